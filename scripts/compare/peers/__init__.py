"""The contestants of compare_peers.py: one model and data set, trained in five ways."""
