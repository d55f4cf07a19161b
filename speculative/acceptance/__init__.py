"""Criteria by which a round accepts drafted tokens, one module each."""
