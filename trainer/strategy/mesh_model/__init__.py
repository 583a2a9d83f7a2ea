"""A model on a mesh: which rank has which part, and the parts of all ranks as a whole."""
