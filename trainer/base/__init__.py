"""Errors, files, processes and distances of numbers: the code that knows nothing of training.

The core and its companions stand on it, and it imports nothing of theirs.
"""
