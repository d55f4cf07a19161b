"""Structured output: from a request's grammar to the matcher that masks ids, behind llguidance."""
