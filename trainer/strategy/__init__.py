"""Parallel strategies. Each is a file here, its rules in `check`, and a YAML in conf/strategy."""
