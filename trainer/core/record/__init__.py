"""The record of a run: its directory, metrics, console and TensorBoard."""
