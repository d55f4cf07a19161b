"""Builds corpora of the documents that clients send."""
