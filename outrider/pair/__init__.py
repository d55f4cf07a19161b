"""Checks a pair of target and drafter: whether their tokenizers fit, and the speedup that drafting brings."""
