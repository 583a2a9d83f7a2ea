"""Hangs: each rank writes its progress to shared memory, and a process per node reads it."""
