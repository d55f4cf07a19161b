"""The drafter: a small language model that follows sessions and rides ahead of them, drafting.

Top down: `service` (puts it together) -> `worker` (one thread, one batched pass at a time) -> `session` (one
session) -> `draft_tree`, `speculative.ranking`. All below the worker is pure; `outrider.source` has the rest.
"""
