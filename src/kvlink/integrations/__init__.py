"""Other people's interfaces: what they have retrieved, handed over as documents. Knows HTTP's field, and no engine."""
