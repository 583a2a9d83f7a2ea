"""`python -m trainer.show RUN [RUN ...]`: report a run, or compare several."""
