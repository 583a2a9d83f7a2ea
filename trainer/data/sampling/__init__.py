"""Which examples an epoch takes, and in which order."""
