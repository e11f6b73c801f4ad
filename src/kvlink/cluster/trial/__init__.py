"""Real servers behind a real gateway on one machine: what a policy is worth, and how good the simulator is."""
