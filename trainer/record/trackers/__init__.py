"""Trackers: the destinations of the record of a run."""
