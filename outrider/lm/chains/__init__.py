"""Models whose passes run no trees: sessions one by one, each a chain, through the library's own cache."""
