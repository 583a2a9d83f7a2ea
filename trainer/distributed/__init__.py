"""Who am I, which group do I belong to, and who asked us to stop."""
