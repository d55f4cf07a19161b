"""One packed tree pass over any causal language model: attention, slot tables, and the check at load.

Knows torch and transformers; knows nothing about services, sampling or the wire.
"""
