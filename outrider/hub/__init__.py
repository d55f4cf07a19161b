"""Models from a Hugging Face hub: the files that a model needs, and their download."""
