"""Structured output: builds the matcher that masks tokens by a request's grammar, with llguidance."""
