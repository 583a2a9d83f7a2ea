"""Changes to modules of a model, and what a dry run finds out about them."""
