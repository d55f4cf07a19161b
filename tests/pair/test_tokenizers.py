"""Two tokenizers fit where each id is the same token in both."""

import json
from typing import Any

from outrider.pair.tokenizers import fit
from outrider.tokens import TokenTable
from tests.conftest import tiny_tokenizer


def table(change: Any = None) -> TokenTable:
    described = json.loads(tiny_tokenizer().to_str())
    if change is not None:
        change(described)
    return TokenTable.from_json(json.dumps(described))


def test_equal_tokenizers_fit() -> None:
    assert fit(table(), table()).ok


def test_the_first_id_that_differs_is_named_with_both_tokens() -> None:
    def swap(described: Any) -> None:
        vocabulary = described["model"]["vocab"]
        one, other = sorted(vocabulary, key=vocabulary.get)[10:12]
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]

    before, found = table(), fit(table(), table(swap))
    assert not found.ok
    assert found.difference.startswith(
        f"id 10 is {before.token(10)!r} in the target's and {before.token(11)!r} in the drafter's; 2 ids"
    )


def test_an_id_that_only_one_tokenizer_has_is_a_difference() -> None:
    def add(described: Any) -> None:
        described["added_tokens"].append({**described["added_tokens"][0], "id": 96, "content": "<tool>"})

    found = fit(table(), table(add))
    assert found.difference.startswith(
        "id 96 is nothing in the target's and '<tool>' in the drafter's; 1 ids"
    )
    assert "of 96 and 97" in found.difference


def test_without_a_tokenizer_nothing_fits_and_the_model_without_one_is_named() -> None:
    assert "the drafter came without" in fit(table(), None).difference
    assert "the target and the drafter came without" in fit(None, None).difference
