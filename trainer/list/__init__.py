"""`python -m trainer.list`: list tasks, recipes, strategies and runs."""
