"""Criteria by which a round accepts drafted tokens, one module each; the path match is the default."""

CRITERIA = {
    "ratio": "speculative.acceptance.ratio:Ratio",
    "multi_step": "speculative.acceptance.multi_step:MultiStep",
    "without_replacement": "speculative.acceptance.without_replacement:WithoutReplacement",
    "k_seq": "speculative.acceptance.k_seq:KSeq",
    "block": "speculative.acceptance.block:BlockVerification",
    "lenience": "speculative.acceptance.lenience:Lenience",
    "typical": "speculative.acceptance.typical:Typical",
    "specdec": "speculative.acceptance.specdec:SpecDec",
    "blockwise": "speculative.acceptance.blockwise:Blockwise",
    "bild": "speculative.acceptance.bild:BiLD",
}
"""Every criterion but the path match, by name; each is a class whose arguments are its parameters.

Those with `needs_q` judge drafts that carry the distribution from which a drafter drew them."""
