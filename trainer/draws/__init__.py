"""Draws: what forward and loss draw at random, as a function of the example."""
