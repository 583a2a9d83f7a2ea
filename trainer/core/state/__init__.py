"""State of a task and a model in Python: one walk over it, and a sandbox that undoes changes."""
