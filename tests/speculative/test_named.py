import pytest

from speculative.acceptance import CRITERIA
from speculative.lookup import LOOKUPS
from speculative.named import load


@pytest.mark.parametrize(("table", "name"), [(t, name) for t in (CRITERIA, LOOKUPS) for name in t])
def test_every_name_in_a_table_loads(table: dict[str, str], name: str) -> None:
    assert callable(load(table, name))


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="path_match"):
        load(CRITERIA, "no_such_criterion")
