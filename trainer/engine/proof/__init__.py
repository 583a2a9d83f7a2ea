"""Law 14: a run proves before its first step, on a few rows, that its task fits any layout."""
