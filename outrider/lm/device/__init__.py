"""Digests made on the device: what the host needs to choose tokens, in one transfer a pass."""
