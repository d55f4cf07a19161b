"""The drafter: a small language model that follows sessions and rides ahead of them, drafting.

Layers, top down: `server` (streams) -> `engine` (one thread, one batched pass at a time) -> `roster` (who is
followed) -> `follower` (one session) -> `draft_tree`, `ranking`, `fragments`. All below the engine is pure.
"""
