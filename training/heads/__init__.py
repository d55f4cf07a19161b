"""Heads for any target: they read the target's hidden states and draft its next tokens.

`job` runs the stages of `outrider distil`; every stage goes on where it was stopped.
"""
