"""`python -m trainer.check`: test the machine, the plan and the first step before a run."""
