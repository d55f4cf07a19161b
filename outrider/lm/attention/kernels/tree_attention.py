"""Tree attention over paged slots in Triton: committed prefix, ancestors and self, in one kernel.

Rows of one session that share a key head make one tile of queries (grouped-query attention), so that each key
is read once for all of them. A tile's slots are cut into spans that are computed side by side (flash
decoding, Dao et al. 2023), each with its own running softmax in float32; a second kernel joins the spans.
Needs triton; under ``TRITON_INTERPRET=1`` the kernels run on the CPU.
"""

import torch
import triton
import triton.language as tl

from outrider.lm.attention.interface import AttentionParams
from outrider.lm.attention.metadata import SPLIT_ITEMS, WORDS, AttentionMetadata
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.int8_plane import storage_of

_INTERPRETED = triton.knobs.runtime.interpret
_LEAST = 16
"""Smallest side of a matrix product on the matrix units."""
_LARGE = 64
"""Queries in a large tile."""


def attend_tiles(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
) -> torch.Tensor:
    """Attention of a step's rows over the slots they see, by Triton kernels.

    An `outrider.lm.attention.metadata.Attend`. Never waits for the host, so a CUDA graph can capture it.
    """
    rows, heads, width = query.shape
    (keys, key_scales), (values, value_scales) = storage_of(keys), storage_of(values)
    key_heads, value_width = keys.shape[0], values.shape[2]
    groups = heads // key_heads
    side = max(_LEAST, triton.next_power_of_2(metadata.tile_rows * groups))
    padded, value_padded = (max(_LEAST, triton.next_power_of_2(size)) for size in (width, value_width))
    items = len(metadata.items)
    output = query.new_empty(rows, heads, value_width)
    # Only items of tiles that were cut leave partial results; such items come first.
    parts = query.new_empty(SPLIT_ITEMS, key_heads, side, value_padded, dtype=torch.float32)
    norms = query.new_empty(SPLIT_ITEMS, key_heads, side, 2, dtype=torch.float32)
    sinks = query if params.sinks is None else params.sinks
    shape = {
        "GROUPS": groups,
        "VALUE_WIDTH": value_width,
        "VALUE_PADDED": value_padded,
        "SIDE": side,
        "HAS_SINKS": params.sinks is not None,
    }
    _attend_item[(items, key_heads)](
        query, keys, values, key_scales, value_scales, output, parts, norms, sinks,
        metadata.items, metadata.tiles, metadata.spans, metadata.first, metadata.upto, metadata.masks,
        metadata.tables,
        width**-0.5 if params.scaling is None else params.scaling, params.softcap or 1.0,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1),
        values.stride(0), values.stride(1), key_scales.stride(0), value_scales.stride(0),
        output.stride(0), output.stride(1),
        **shape,
        WIDTH=width, PADDED=padded, MASK_WORDS=WORDS, PAGE=BLOCK, HAS_CAP=params.softcap is not None,
        IS_INT8=keys.dtype is torch.int8, WIDEN=_INTERPRETED, **loop_of(padded, query.element_size(), side),
    )  # fmt: skip
    _join_items[(rows, heads)](
        output, parts, norms, sinks, metadata.row_tile, metadata.tiles, metadata.spans,
        output.stride(0), output.stride(1), key_heads, **shape,
    )  # fmt: skip
    return output


def loop_of(width: int, bytes_each: int, side: int) -> dict[str, int]:
    """How a tile of ``side`` queries loops over slots: the keys of a turn, and the stages of its pipeline.

    The stages of keys and values fit the shared memory; int8 counts at the width of the queries, to which it
    is converted. A large tile takes half as many keys: with fewer registers and less shared memory more
    programs share a processor, which hides what each of them waits for.
    """
    row = width * bytes_each
    keys = 64 if row <= 256 else 32 if row <= 512 else 16
    if side < _LARGE:
        return {"KEYS": keys, "num_stages": 3}
    return {"KEYS": max(_LEAST, keys // 2), "num_stages": 2}


@triton.jit
def _vectors(starts, alive, column, WIDTH: tl.constexpr):
    """Loads ``WIDTH`` elements from each of ``starts``; zero beyond them and where not ``alive``."""
    inside = alive[:, None] & (column < WIDTH)[None, :]
    return tl.load(starts[:, None] + column[None, :], mask=inside, other=0.0)


@triton.jit
def _slots(starts, scales, slot, alive, column, rows, WIDTH: tl.constexpr, IS_INT8: tl.constexpr):
    """Loads keys or values; those in int8 become what `Int8Plane` gives, in the dtype of ``rows``."""
    found = _vectors(starts, alive, column, WIDTH)
    if IS_INT8:
        found = (found.to(tl.float32) * tl.load(scales + slot, mask=alive, other=0.0)[:, None]).to(rows.dtype)
    return found


@triton.jit
def _allowed(mask_of_row, alive, since, upto, at, end, base, MASKED: tl.constexpr):
    """Which rows see which slots ``at`` of their session.

    A row sees the slots of committed positions and trunk from ``since`` to ``upto``. Where ``MASKED``, slots
    from ``base`` on are branching nodes, of which a row sees those in its mask.
    """
    inside = at < end
    seen = (at[None, :] >= since[:, None]) & (at[None, :] < upto[:, None])
    if MASKED:
        node = tl.maximum(at - base, 0)
        word = tl.load(
            mask_of_row[:, None] + (node // 32)[None, :],
            mask=alive[:, None] & (inside & (at >= base))[None, :],
            other=0,
        )
        seen = seen | (((word >> (node % 32)[None, :]) & 1) == 1)
    return seen & inside[None, :]


@triton.jit
def _mix(scores, value, best, total, mixed):
    """One turn of the running softmax; returns highest score, sum of weights and weighted values so far."""
    highest = tl.maximum(best, tl.max(scores, 1))
    # A row that has seen no slot yet has no highest score to subtract.
    offset = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(scores - offset[:, None])
    shrink = tl.exp(best - offset)
    mixed = tl.dot(weights.to(value.dtype), value, mixed * shrink[:, None], input_precision="ieee")
    return highest, total * shrink + tl.sum(weights, 1), mixed


@triton.jit
def _turn(
    rows, keys, values, key_scales, value_scales, table, mask_of_row, alive, since, upto, start, end, base,
    best, total, mixed,
    scale, softcap, key_slot, value_slot, column, value_column,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    HAS_CAP: tl.constexpr, IS_INT8: tl.constexpr, WIDEN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attention of a tile's queries over ``KEYS`` slots from ``start``, added to the running softmax."""
    at = start + tl.arange(0, KEYS)
    slot = tl.load(table + at // PAGE, mask=at < end, other=0).to(tl.int64) * PAGE + at % PAGE
    there = at < end
    key = _slots(keys + slot * key_slot, key_scales, slot, there, column, rows, WIDTH, IS_INT8)
    value = _slots(
        values + slot * value_slot, value_scales, slot, there, value_column, rows, VALUE_WIDTH, IS_INT8
    )
    if WIDEN:  # the interpreter multiplies bfloat16 by its bits
        rows, key, value = rows.to(tl.float32), key.to(tl.float32), value.to(tl.float32)
    # Inductor passes a number of Python's as float64, which would widen all that follows.
    scores = (tl.dot(rows, tl.trans(key), input_precision="ieee") * scale).to(tl.float32)
    if HAS_CAP:
        scores = (softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)).to(tl.float32)
    allowed = _allowed(mask_of_row, alive, since, upto, at, end, base, MASKED)
    scores = tl.where(allowed, scores, float("-inf"))
    return _mix(scores, value, best, total, mixed)


@triton.jit
def _attend_item(
    query, keys, values, key_scales, value_scales, output, parts, norms, sinks,
    items, tiles, spans, first, upto, masks, tables,
    scale, softcap,
    query_row, query_head, key_head, key_slot,
    value_head, value_slot, key_scale_head, value_scale_head, output_row, output_head,
    GROUPS: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_PADDED: tl.constexpr, SIDE: tl.constexpr,
    HAS_SINKS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr,
    MASK_WORDS: tl.constexpr, PAGE: tl.constexpr, HAS_CAP: tl.constexpr, IS_INT8: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Attention of one item and key head: a tile's queries over one span of its session's slots."""
    item, head = tl.program_id(0), tl.program_id(1)
    tile = tl.load(items + item * 3)
    begin, end = tl.load(items + item * 3 + 1), tl.load(items + item * 3 + 2)
    if begin >= end:
        return
    low, count = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
    table = tables + tl.load(tiles + tile * 4 + 2)
    base = tl.load(tiles + tile * 4 + 3)
    lane = tl.arange(0, SIDE)
    alive = lane // GROUPS < count
    row = low + lane // GROUPS
    query_at = head * GROUPS + lane % GROUPS
    column = tl.arange(0, PADDED)
    value_column = tl.arange(0, VALUE_PADDED)
    rows = _vectors(query + row.to(tl.int64) * query_row + query_at * query_head, alive, column, WIDTH)
    since = tl.load(first + row, mask=alive, other=0)
    until = tl.load(upto + row, mask=alive, other=0)
    mask_of_row = masks + row * MASK_WORDS
    # One plane of a large pool has more elements than an int32 counts.
    keys += head.to(tl.int64) * key_head
    values += head.to(tl.int64) * value_head
    key_scales += head.to(tl.int64) * key_scale_head
    value_scales += head.to(tl.int64) * value_scale_head
    best = tl.full([SIDE], float("-inf"), tl.float32)
    total = tl.zeros([SIDE], tl.float32)
    mixed = tl.zeros([SIDE, VALUE_PADDED], tl.float32)
    # Masks are read in the last turns alone, which reach the branching nodes.
    plain = begin + tl.maximum(tl.minimum(end, base) - begin, 0) // KEYS * KEYS
    for start in range(begin, plain, KEYS):
        best, total, mixed = _turn(
            rows, keys, values, key_scales, value_scales, table, mask_of_row, alive, since, until,
            start, end, base, best, total, mixed, scale, softcap, key_slot, value_slot, column, value_column,
            WIDTH, VALUE_WIDTH, KEYS, PAGE, HAS_CAP, IS_INT8, WIDEN, False,
        )  # fmt: skip
    for start in range(plain, end, KEYS):
        best, total, mixed = _turn(
            rows, keys, values, key_scales, value_scales, table, mask_of_row, alive, since, until,
            start, end, base, best, total, mixed, scale, softcap, key_slot, value_slot, column, value_column,
            WIDTH, VALUE_WIDTH, KEYS, PAGE, HAS_CAP, IS_INT8, WIDEN, True,
        )  # fmt: skip
    if tl.load(spans + tile * 2 + 1) == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + query_at, mask=alive, other=0.0).to(tl.float32)
            highest = tl.maximum(best, sink)
            mixed = mixed * tl.exp(best - highest)[:, None]
            total = total * tl.exp(best - highest) + tl.exp(sink - highest)
        tl.store(
            output
            + row[:, None].to(tl.int64) * output_row
            + query_at[:, None] * output_head
            + value_column[None, :],
            mixed / tl.where(total > 0, total, 1.0)[:, None],
            mask=alive[:, None] & (value_column < VALUE_WIDTH)[None, :],
        )
    else:
        place = (item.to(tl.int64) * tl.num_programs(1) + head) * SIDE + lane
        tl.store(parts + place[:, None] * VALUE_PADDED + value_column[None, :], mixed)
        tl.store(norms + place * 2, best)
        tl.store(norms + place * 2 + 1, total)


@triton.jit
def _join_items(
    output, parts, norms, sinks, row_tile, tiles, spans,
    output_row, output_head, key_heads,
    GROUPS: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_PADDED: tl.constexpr, SIDE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Joins the spans of one row and query head into its output; zero for padding."""
    row, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, VALUE_PADDED)
    there = output + row.to(tl.int64) * output_row + head * output_head + column
    inside = column < VALUE_WIDTH
    tile = tl.load(row_tile + row)
    if tile < 0:
        tl.store(there, tl.zeros([VALUE_PADDED], tl.float32), mask=inside)
        return
    item = tl.load(spans + tile * 2)
    count = tl.load(spans + tile * 2 + 1)
    if count == 1:
        return
    lane = (row - tl.load(tiles + tile * 4)) * GROUPS + head % GROUPS
    place = (item.to(tl.int64) * key_heads + head // GROUPS) * SIDE + lane
    best = tl.load(norms + place * 2)
    total = tl.load(norms + place * 2 + 1)
    mixed = tl.load(parts + place * VALUE_PADDED + column)
    for _following in range(1, count):
        place += key_heads * SIDE
        other = tl.load(norms + place * 2)
        highest = tl.maximum(best, other)
        offset = tl.where(highest == float("-inf"), 0.0, highest)
        shrink, weight = tl.exp(best - offset), tl.exp(other - offset)
        total = total * shrink + tl.load(norms + place * 2 + 1) * weight
        mixed = mixed * shrink + tl.load(parts + place * VALUE_PADDED + column) * weight
        best = highest
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(best, sink)
        mixed = mixed * tl.exp(best - highest)
        total = total * tl.exp(best - highest) + tl.exp(sink - highest)
    tl.store(there, mixed / total, mask=inside)
