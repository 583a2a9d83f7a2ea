"""Sweeps: many runs from one command, each in its own processes."""
