"""Keys and values of sessions: blocks of slots, the pool that holds them, one table a session."""
