"""Criteria by which a round accepts drafted tokens, by name; `speculative.named.load` resolves one."""

CRITERIA = {"path_match": "speculative.acceptance.path_match:path_match"}
