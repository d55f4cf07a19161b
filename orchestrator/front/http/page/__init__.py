"""Pages for browsers: one that shows speculation at work, one that describes the API."""
