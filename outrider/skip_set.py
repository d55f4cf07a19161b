"""Skip sets: the sublayers of a model that are left out, and how settings write them. Pure.

`3,5.attention,7.mlp` is layer 3, the attention of layer 5 and the MLP of layer 7.
"""

import re
from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple, get_args

from speculative.errors import InvalidRequest

Kind = Literal["attention", "mlp"]
"""The two sublayers of a layer."""
KINDS: tuple[Kind, ...] = get_args(Kind)
"""In the order in which a layer computes them."""
_WRITTEN = re.compile(rf"(0|[1-9]\d*)(?:\.({'|'.join(KINDS)}))?", re.ASCII)


class Sublayer(NamedTuple):
    """The attention or the MLP of one layer."""

    layer: int
    """0 is the first layer."""
    kind: Kind

    def __str__(self) -> str:
        return f"{self.layer}.{self.kind}"


SkipSet = frozenset[Sublayer]
"""The sublayers that are left out. A layer that is left out whole has both of its sublayers here."""


def whole_layers(layers: Iterable[int]) -> SkipSet:
    """Both sublayers of these layers."""
    return frozenset(Sublayer(layer, kind) for layer in layers for kind in KINDS)


def read_skips(items: Iterable[str]) -> SkipSet:
    """The skip set that settings write as these items.

    Raises InvalidRequest for an item that names no layer or sublayer, or what another item has named.
    """
    found: dict[Sublayer, str] = {}
    for item in items:
        matched = _WRITTEN.fullmatch(item)
        if matched is None:
            raise InvalidRequest(
                f"{item!r} names nothing to skip: write 3 for layer 3, 3.attention or 3.mlp for one of its "
                "sublayers"
            )
        layer = int(matched[1])
        for kind in KINDS:
            sublayer = Sublayer(layer, kind)
            if matched[2] not in (None, kind):
                continue
            if sublayer in found:
                raise InvalidRequest(_twice(item, found[sublayer], layer))
            found[sublayer] = item
    return frozenset(found)


def _twice(item: str, before: str, layer: int) -> str:
    if item == before:
        return f"{item} is skipped twice: write it once"
    part = max(item, before, key=len)
    return (
        f"layer {layer} is skipped whole and in part: write {layer} to skip all of it, or {part} to skip "
        "that alone"
    )


def write_skips(skip: Collection[Sublayer]) -> tuple[str, ...]:
    """The skip set as settings write it, in order of layers."""
    kinds = {layer: [one for one in sorted(skip) if one.layer == layer] for layer, _ in sorted(skip)}
    return tuple(str(layer if len(ones) == len(KINDS) else ones[0]) for layer, ones in kinds.items())
