"""The front door: admits requests, places sessions on verifiers, names their sources, relays their tokens."""
