"""What a worker shows of itself: the last rounds of each session, spans, log lines and metrics."""
