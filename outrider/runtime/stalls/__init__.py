"""Keeps pauses of a process short, and tells how long its event loop stood still and what ran meanwhile."""
