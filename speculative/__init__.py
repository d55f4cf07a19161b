"""The pure core: every decision of speculative decoding, with no socket, clock, thread or device in it.

Where to look, in the order of one round:

======================  =====================================================================================
`draft`, `fragment`     a small tree of drafted tokens; the same with the prefix that it continues
`draft_pool`            one draft tree per session from many sources: late, stale, unanchored, malformed
`draft_nodes`           the drafted nodes of a session, and the likeliest of them in order
`calibration`           measured acceptance behind each source's survival estimates
`budget`                how many drafted nodes a batch of sessions verifies in one pass
`tree`                  the tree that a round verifies, as flat arrays
`target_sampler`        the target's own token at a node: that node's history, position and noise
`sampling`, `noise`     logits to a token: penalties, temperature, cuts; counter-based randomness
                        (`history` counts the tokens that penalties need)
`digest`, `choice`      what of a row of logits suffices to choose its token; the choice from that alone
                        (`processed_digest` applies bias, penalties and masks to what a digest says)
`ranking`               the tokens that a drafter expects of the target, with their probabilities
`grammar`               the grammar of a request's text, as sampling needs it
`acceptance`            which drafted tokens a round accepts: the path match, and criteria by name
`stop`, `text`          where a request ends; the text of its generated ids
`lookup`                drafts copied from the session's own text, or from a given one
`hashing`               the rolling hash by which messages name a prefix
`params`, `logprobs`    the fields of a request: sampling, log-probabilities
`stats`                 what a request cost
`errors`                the errors that Outrider reports, by whose fault each is
`implementations`       tables of implementations by name
======================  =====================================================================================

The law they keep: token t of a request is `argmax over v of processed_logprob[v] + gumbel(seed, t, v)`,
whatever was drafted, unless the request names another criterion. docs/exactness.md states the law in full and
says how it is proved.

Imports NumPy and the standard library only.
"""
