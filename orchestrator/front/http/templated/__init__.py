"""Parsing of answers by the response templates that checkpoints bring."""
