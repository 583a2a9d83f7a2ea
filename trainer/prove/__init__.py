"""Proof that a training script of any framework learns the same on another layout."""
