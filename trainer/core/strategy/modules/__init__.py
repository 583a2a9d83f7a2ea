"""Changes to modules of a model, and a dry run that inspects them."""
