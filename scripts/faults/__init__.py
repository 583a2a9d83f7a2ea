"""Fault injection: what `python scripts/faults.py` runs. One module per kind of fault."""
