"""Verification: train the user's task in several layouts and compare the results."""
