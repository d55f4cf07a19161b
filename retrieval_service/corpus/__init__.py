"""Corpora on disk: text as a suffix array that is mapped, not loaded (REST, arXiv 2311.08252)."""
