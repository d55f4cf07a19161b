"""The engine: what is decoded, in which order, and the thread that does it."""
