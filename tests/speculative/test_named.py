import pytest

from speculative.named import load

TABLE = {"length": "builtins:len", "largest": "builtins:max"}


def test_a_name_of_the_table_gives_what_the_table_names() -> None:
    assert load(TABLE, "length") is len


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="largest, length"):
        load(TABLE, "no_such_name")
