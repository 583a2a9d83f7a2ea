"""Checks of a GPU: what `python scripts/check_gpu.py` runs. One module per topic."""
