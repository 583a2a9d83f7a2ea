"""Parallel strategies. One is a file here, with its rules in `check`, and a YAML in conf/strategy."""
