"""Many servers as one: which of them a request goes to, a gateway that asks them, a simulator that tries it out."""
