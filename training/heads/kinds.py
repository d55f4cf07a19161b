"""The kinds of head that `outrider distil` trains. Pure: the command line names them without torch."""

MEDUSA, HYDRA, EAGLE, EAGLE3, MTP = "medusa", "hydra", "eagle", "eagle3", "mtp"
PASS, LM, BLOCK = "pass", "lm", "block"
KINDS = (MEDUSA, HYDRA, EAGLE, EAGLE3, MTP, PASS, LM, BLOCK)
MODELS = (LM, BLOCK)
"""Kinds that are models of their own, which begin as the model that `--drafter` names."""
