"""The kinds of head that `outrider distil` trains. Pure: the command line names them without torch."""

MEDUSA, BLOCKWISE, HYDRA, EAGLE, EAGLE3, MTP = "medusa", "blockwise", "hydra", "eagle", "eagle3", "mtp"
PASS, LM, BLOCK = "pass", "lm", "block"
KINDS = (MEDUSA, BLOCKWISE, HYDRA, EAGLE, EAGLE3, MTP, PASS, LM, BLOCK)
ON_ONE_STATE = (MEDUSA, BLOCKWISE, HYDRA)
"""Kinds whose heads all read the same hidden state, one head for each token of a draft."""
MODELS = (LM, BLOCK)
"""Kinds that are models of their own, which begin as the model that `--drafter` names."""
