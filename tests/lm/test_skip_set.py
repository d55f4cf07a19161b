"""Skip sets as settings write them."""

import pytest

from outrider.skip_set import Sublayer, read_skips, whole_layers, write_skips
from speculative.errors import InvalidRequest


def test_layers_and_sublayers_are_read_by_name() -> None:
    found = read_skips(["3", "5.attention", "7.mlp"])
    assert found == whole_layers([3]) | {Sublayer(5, "attention"), Sublayer(7, "mlp")}


def test_a_layer_of_which_both_sublayers_are_named_is_written_whole_and_in_order() -> None:
    assert write_skips(read_skips(["12", "7.mlp", "5.mlp", "0.attention", "5.attention"])) == (
        "0.attention",
        "5",
        "7.mlp",
        "12",
    )


@pytest.mark.parametrize("item", ["x", "-1", "03", "3.norm", "3.", "3.5", "", "attention", "3.Attention"])
def test_an_item_that_names_no_sublayer_is_refused_with_what_to_write(item: str) -> None:
    with pytest.raises(InvalidRequest, match=r"names nothing to skip: write 3 for layer 3, 3\.attention or"):
        read_skips(["1", item])


@pytest.mark.parametrize("item", ["3", "3.attention", "3.mlp"])
def test_an_item_that_is_written_twice_is_refused(item: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{item} is skipped twice: write it once$"):
        read_skips([item, "1", item])


@pytest.mark.parametrize("items", [("3", "3.mlp"), ("3.mlp", "3"), ("3.attention", "3.mlp", "3")])
def test_a_layer_that_is_named_whole_and_in_part_is_refused(items: tuple[str, ...]) -> None:
    why = r"layer 3 is skipped whole and in part: write 3 to skip all of it, or 3\.\w+ to skip that alone"
    with pytest.raises(InvalidRequest, match=why):
        read_skips(items)
