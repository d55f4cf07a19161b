"""Drafts on a device for a target in the cloud; the text is the target's, token for token.

`EdgeDrafter` and `AsyncEdgeDrafter` are clients whose requests a small local model drafts for.
"""
