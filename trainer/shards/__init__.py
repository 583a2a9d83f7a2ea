"""`python -m trainer.shards`: write, index and check data in shards."""
