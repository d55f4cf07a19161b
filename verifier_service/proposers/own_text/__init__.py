"""Proposers that draft for one session from its own text and request: copies, and what a grammar forces."""
