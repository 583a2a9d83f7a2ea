"""A rank, or the agent of ranks, of `Trainer.launch`; not for the command line."""
