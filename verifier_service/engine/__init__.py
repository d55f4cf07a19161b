"""The engine: decides what a step computes, commits what the target says, and owns the thread for it."""
