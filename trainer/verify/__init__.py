"""The proof: the user's task trained in several layouts, and compared."""
