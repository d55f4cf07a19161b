from typing import Any

import pytest

from speculative.errors import MalformedDraft
from speculative.fragment import Fragment


def fragment(**changes: Any) -> Fragment:
    fields: dict[str, Any] = {
        "source": 1,
        "epoch": 3,
        "base": 4,
        "prefix_hash": 5,
        "tokens": (7, 8),
        "parents": (-1, 0),
        "survival": (0.9, 0.5),
    }
    return Fragment(**(fields | changes))


def test_a_fragment_has_as_many_nodes_as_tokens() -> None:
    assert len(fragment()) == 2


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokens": (), "parents": (), "survival": ()}, "0 nodes"),
        ({"tokens": (7,) * 256, "parents": (-1,) * 256, "survival": (0.5,) * 256}, "256 nodes"),
        ({"parents": (-1,)}, "1 parents"),
        ({"survival": (0.5,)}, "1 survivals"),
        ({"parents": (-1, 1)}, "node 1 has parent 1"),
        ({"parents": (1, -1)}, "node 0 has parent 1"),
        ({"parents": (-1, -2)}, "node 1 has parent -2"),
        ({"parents": (-1, 9)}, "node 1 has parent 9"),
        ({"survival": (0.5, 1.5)}, "survival 1.5"),
        ({"survival": (0.5, float("nan"))}, "survival nan"),
        ({"tokens": (7, -8)}, "negative id -8"),
        ({"source": 0}, "source is 0"),
        ({"source": 256}, "source is 256"),
        ({"base": -1}, "base -1"),
        ({"epoch": -1}, "epoch -1"),
        ({"prefix_hash": 1 << 64}, "out of range"),
    ],
)
def test_what_no_correct_source_sends_is_malformed(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(MalformedDraft, match=complaint):
        fragment(**changes)
