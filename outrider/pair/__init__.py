"""Whether a target and a drafter go together: do their tokenizers fit, and what would drafting bring."""
