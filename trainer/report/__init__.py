"""`python -m trainer.report DIR`: a run as one page."""
