"""Parallel strategies. Each is one file, with its rules in `check`, and a YAML in conf/strategy."""
