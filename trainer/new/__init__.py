"""`python -m trainer.new NAME`: a project to begin with."""
