"""Attention of a packed pass: its interface to the model, its metadata, and kernels."""
