"""Checkpoints as transactions: the state of a run, verified, and published as a whole."""
