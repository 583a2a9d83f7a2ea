"""Fault injection: what `python scripts/faults` runs. One module per kind of fault."""
