"""The deterministic profile: linear layers and attention whose bits do not depend on the batch."""
