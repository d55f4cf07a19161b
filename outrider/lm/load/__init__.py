"""From a folder or a hub id to a checked model: source, weights, tokenizer, layout, check."""
