"""One-line edits of the code, each of which some test must see."""
