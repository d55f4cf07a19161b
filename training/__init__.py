"""The recipe of the embedded pair: a target, and a drafter distilled from it, that know some Python."""
