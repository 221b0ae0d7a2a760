"""Numeric operations. `reference` is plain torch: the CPU path, the oracle, the documentation."""
