"""Attention of rows over slots that lie in pages: one function, in plain torch and as a Triton kernel."""
