"""Processes that belong together: rendezvous, agreement, the collectives, failing together."""
