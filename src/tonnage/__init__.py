"""Tonnage: know before you launch, keep the batch exact, one line from a laptop to a cluster."""

__version__ = "0.1.0"
