"""What every process shares that drafts for verifiers: the events of Attach, its messages, its streams.

Knows nothing of how drafts come about.
"""
