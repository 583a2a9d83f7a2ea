"""Blocks of a model divided over stages, and the exchange between stages."""
