"""Tells how long a process's event loop stood still, and what ran meanwhile."""
