"""Launchers, rendezvous, the process group, stop requests and hang detection."""
