"""Random numbers as functions: of example and purpose, and of the rows of a forward pass."""
