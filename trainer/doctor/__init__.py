"""The doctor: check the environment of a run before the run is started."""
