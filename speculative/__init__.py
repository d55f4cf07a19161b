"""The pure core: every decision of speculative decoding, with no socket, clock, thread or device in it.

Where to look, in the order of one round:

======================  =====================================================================================
`merge`                 one draft tree per session from many sources: late, stale, waiting, malformed
                        (`fragment` is what they offer, `waiting` where it waits)
`tree`                  the tree that a round verifies, as flat arrays
`target`                the target's own token at a node: that node's history, position and noise
`sampling`, `noise`     logits to a token: penalties, temperature, cuts; counter-based randomness
                        (`history` counts what penalties need)
`acceptance`            which drafted tokens the target agrees with, by name
`commit`, `text`        where a request ends; what its ids read as
`lookup`                drafts copied from the session's own text
`hashing`               the rolling hash by which messages say where they stand
`params`, `stats`       what a request asks for; what it cost
`errors`                what can go wrong, and whose fault it is
`named`                 tables of implementations by name
======================  =====================================================================================

The law they keep: token t of a request is `argmax over v of processed_logprob[v] + gumbel(seed, t, v)`,
whatever was drafted. docs/exactness.md states it in full and says how it is proved.

Imports NumPy and the standard library only.
"""
