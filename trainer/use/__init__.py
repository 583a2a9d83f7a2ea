"""`python -m trainer.use RUN`: evaluate a trained model, write its predictions, or export it."""
