"""The retrieval worker: a shared memory of text that drafts; needs neither torch nor transformers."""
