"""What a run shows and writes: its directory, metrics, console and TensorBoard."""
