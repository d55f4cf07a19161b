"""Everything that a process needs to draft for verifiers, but the drafting itself.

Top down: `server` (Describe, Attach) -> `streams` (messages) -> `worker` (the one thread) -> `roster` (who is
followed) -> `followed` (one session's ids and their hashes).
"""
