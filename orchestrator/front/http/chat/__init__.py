"""Tools and reasoning in chat: the formats that families of models write, grammars and a parser for them."""
