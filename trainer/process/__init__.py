"""The process of a run: standard streams, working directory, imports and clock."""
