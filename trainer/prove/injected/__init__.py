"""Folder for PYTHONPATH: its `sitecustomize` must be the only module that scripts could import."""
