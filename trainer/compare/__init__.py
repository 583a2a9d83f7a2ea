"""`python -m trainer.compare A B`: how runs differ, and from which step on."""
