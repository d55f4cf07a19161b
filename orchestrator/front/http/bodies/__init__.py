"""Bodies of HTTP requests: their bounds, how they arrive, and the processes that read the large ones."""
