import pytest

from speculative.implementations import load_implementation

TABLE = {"length": "builtins:len", "largest": "builtins:max"}


def test_a_name_of_the_table_gives_what_the_table_names() -> None:
    assert load_implementation(TABLE, "length") is len


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="largest, length"):
        load_implementation(TABLE, "no_such_name")
