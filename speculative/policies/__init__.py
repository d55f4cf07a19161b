"""Draft policies: how far and how wide a source drafts, decided from what the session has seen.

`policy` says what a policy is, `names` has their table, `book` keeps what they learnt over the sessions of a
worker, and `local` applies one to drafts made inside the verifier. Most other files are one policy each. A
policy changes which nodes are drafted and so the speed, never the output.
"""
