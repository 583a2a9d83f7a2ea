"""Setup: checks before the start, agreement of the ranks, data and model, the run directory."""
