"""Proposers that draft with a head: a small network that reads the target's hidden states."""
