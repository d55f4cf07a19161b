"""Planes of the target's pool for the keys and values of proposers, and what fills them."""
