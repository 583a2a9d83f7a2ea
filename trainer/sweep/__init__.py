"""Sweeps: many runs from one command, each in processes of its own."""
