"""The doctor: what a run started like this would meet, before it is started."""
