"""Checks of a GPU: what `python scripts/gpu/check_gpu.py` runs. One module per topic."""
