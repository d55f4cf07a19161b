"""The event loop's side of sessions: what Open asks for, who is fenced off, and who reads which tokens."""
