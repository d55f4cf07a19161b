"""Sources outside this worker: one Attach stream to each address, shared by all sessions that name it."""
