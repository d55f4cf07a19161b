"""One model over several ranks: the group, its messages, its leader."""
