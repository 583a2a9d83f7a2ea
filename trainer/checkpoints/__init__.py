"""Checkpoints as transactions: what a run saves, verified and published whole."""
