"""Hang detection: ranks write their progress to shared memory; a process per node reads it."""
