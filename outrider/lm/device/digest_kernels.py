"""What a digest takes from whole rows of logits, in Triton: each reads a row once, where it lies.

In torch each of these is a dozen operations, which write what they keep in between: noise as int64, and a
boolean and a product for each of eight ids. A row's ids are cut into chunks that are computed side by side.
Needs triton; under ``TRITON_INTERPRET=1`` the kernels run on the CPU.
"""

import torch
import triton
import triton.language as tl

from outrider.lm.device.digest import LARGEST, STRONGEST, WIDENING
from outrider.lm.device.noise import IDS, KEY_STEPS, MULTIPLIERS
from speculative.noise import DOMAIN

_CHUNK = 2048
"""Ids of one program."""
# A kernel reads constants of its own module only.
_IDS = tl.constexpr(IDS)
_LARGEST, _STRONGEST, _WIDENING = (tl.constexpr(bound) for bound in (LARGEST, STRONGEST, WIDENING))
_M0, _M1 = (tl.constexpr(word) for word in MULTIPLIERS)
_K0, _K1 = (tl.constexpr(word) for word in KEY_STEPS)
_DOMAIN = tl.constexpr(DOMAIN)


class KernelReductions:
    """The whole-row parts of a digest by Triton kernels. A `outrider.lm.device.digest.RowReductions`."""

    slab = 2**25

    def rows(self, logits: torch.Tensor) -> torch.Tensor:
        """The rows as they are: kernels widen what they load."""
        return logits

    def highest(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The lowest id that has the row's maximum, int64 ``[n, 1]``, and the maximum, float32."""
        count, width = rows.shape
        chunks = triton.cdiv(width, _CHUNK)
        tops = rows.new_empty(count, chunks, dtype=torch.float32)
        lows = rows.new_empty(count, chunks, dtype=torch.int64)
        _highest[(count, chunks)](rows, rows.stride(0), width, tops, lows, CHUNK=_CHUNK)
        top = tops.amax(dim=1, keepdim=True)
        return torch.where(tops == top, lows, width - 1).amin(dim=1, keepdim=True), top

    def mass(self, rows: torch.Tensor, top: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
        """The sum of exp((logit - top) * factor) over each row, float64 ``[n, 1]``."""
        count, width = rows.shape
        chunks = triton.cdiv(width, _CHUNK)
        sums = rows.new_empty(count, chunks, dtype=torch.float64)
        given = top if factors is None else factors
        _mass[(count, chunks)](
            rows, rows.stride(0), width, top, given, sums, CHUNK=_CHUNK, SCALED=factors is not None
        )
        return sums.sum(dim=1, keepdim=True)

    def bounds(
        self, rows: torch.Tensor, asks: torch.Tensor, factors: torch.Tensor, noise_bounds: torch.Tensor
    ) -> torch.Tensor:
        """Upper bounds of every id's score, float32 ``[n, V]``."""
        count, width = rows.shape
        found = rows.new_empty(count, width, dtype=torch.float32)
        _bounds[(count, triton.cdiv(width, _CHUNK))](
            rows, rows.stride(0), width, asks, asks.stride(0), factors, noise_bounds, found,
            BLOCKS=_CHUNK // IDS,
        )  # fmt: skip
        return found

    def leads(self, asks: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The leads of the noise of ``ids``, int64 ``[n, k]``."""
        count, places = ids.shape
        found = torch.empty_like(ids)
        _leads[(count,)](
            asks, asks.stride(0), ids, ids.stride(0), found, places, PADDED=triton.next_power_of_2(places)
        )
        return found

    def reaching(self, rows: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
        """The number of ids whose logit is at least ``least``, int64 ``[n, 1]``."""
        behind = torch.full_like(least, rows.shape[1], dtype=torch.int64)
        counts, _ = self._before(rows, behind, least, None)
        return counts

    def before(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        logits: torch.Tensor,
        top: torch.Tensor,
        factors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How many ids are ranked before each of ``ids``, int64 ``[n, k]``, and their mass, float64."""
        counts, masses = self._before(rows, ids, logits, (top, factors))
        assert masses is not None
        return counts, masses

    def _before(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        logits: torch.Tensor,
        weighed: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        count, width = rows.shape
        chunks, places = triton.cdiv(width, _CHUNK), ids.shape[1]
        counts = rows.new_empty(count, places, chunks, dtype=torch.int32)
        masses = None if weighed is None else rows.new_empty(count, places, chunks, dtype=torch.float64)
        top, factors = (logits, logits) if weighed is None else weighed
        _before[(count, chunks)](
            rows, rows.stride(0), width, ids, ids.stride(0), logits, logits.stride(0), top, factors,
            counts, counts if masses is None else masses,
            CHUNK=_CHUNK, PLACES=places, WEIGHED=masses is not None,
        )  # fmt: skip
        return counts.sum(dim=2), None if masses is None else masses.sum(dim=2)


@triton.jit
def _chunk_of(rows, row_stride, width, ids):
    """The logits of ``ids`` of this program's row, widened; -inf beyond the row."""
    row = tl.program_id(0).to(tl.int64)
    return tl.load(rows + row * row_stride + ids, mask=ids < width, other=float("-inf")).to(tl.float32)


@triton.jit
def _highest(rows, row_stride, width, tops, lows, CHUNK: tl.constexpr):
    """The maximum of one chunk of a row, and the lowest id that has it; NaN where the chunk holds NaN."""
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    logits = _chunk_of(rows, row_stride, width, ids)
    top = tl.max(logits, 0)
    low = tl.min(tl.where((logits == top) & (ids < width), ids, width - 1), 0)
    strange = tl.max((logits != logits).to(tl.int32), 0)
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(tops + place, tl.where(strange > 0, float("nan"), top))
    tl.store(lows + place, low.to(tl.int64))


@triton.jit
def _weights(logits, tops, factors, SCALED: tl.constexpr):
    """exp((logit - top) * factor) in float64; a row without a finite top is not weighed but fetched."""
    top = tl.load(tops + tl.program_id(0)).to(tl.float64)
    shifted = logits.to(tl.float64) - tl.where(tl.abs(top) == float("inf"), 0.0, top)
    if SCALED:
        shifted = shifted * tl.load(factors + tl.program_id(0)).to(tl.float64)
    return tl.exp(shifted)


@triton.jit
def _mass(rows, row_stride, width, tops, factors, sums, CHUNK: tl.constexpr, SCALED: tl.constexpr):
    """The sum of one chunk's weights."""
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    logits = _chunk_of(rows, row_stride, width, ids)
    weights = tl.where(ids < width, _weights(logits, tops, factors, SCALED), 0.0)
    tl.store(sums + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(weights, 0))


@triton.jit
def _philox(block, seed, position):
    """The four words of each Philox block of a row's noise."""
    none = tl.zeros_like(block).to(tl.uint64)
    a, c, d = block.to(tl.uint64), none, none
    b = none + position.to(tl.uint64, bitcast=True)
    one = none + seed.to(tl.uint64, bitcast=True)
    other = none + _DOMAIN
    for _ in tl.static_range(10):
        high_a, low_a = tl.umulhi(a, none + _M0), a * _M0
        high_c, low_c = tl.umulhi(c, none + _M1), c * _M1
        a, b, c, d = high_c ^ b ^ one, low_c, high_a ^ d ^ other, low_a
        one += _K0
        other += _K1
    return a, b, c, d


@triton.jit
def _lead(a, b, c, d, part):
    """The leads of ids by their place ``part`` in a block, 0 to 15."""
    word = tl.where(part < 8, tl.where(part < 4, a, b), tl.where(part < 12, c, d))
    return ((word >> (16 * (part % 4)).to(tl.uint64)) & 0xFFFF).to(tl.int32)


@triton.jit
def _leads(asks, ask_stride, ids, ids_stride, found, places, PADDED: tl.constexpr):
    """The leads of one row's ids."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED)
    token = tl.load(ids + row * ids_stride + place, mask=place < places, other=0).to(tl.int32)
    seed, position = tl.load(asks + row * ask_stride), tl.load(asks + row * ask_stride + 1)
    a, b, c, d = _philox(token // _IDS, seed, position)
    tl.store(found + row * places + place, _lead(a, b, c, d, token % _IDS).to(tl.int64), mask=place < places)


@triton.jit
def _bounds(
    rows, row_stride, width, asks, ask_stride, factors, noise_bounds, found,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Upper bounds of the scores of one chunk: logit over temperature, plus the most its noise can be."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    seed, position = tl.load(asks + row * ask_stride), tl.load(asks + row * ask_stride + 1)
    a, b, c, d = _philox(block, seed, position)
    part = tl.arange(0, _IDS)[None, :]
    lead = _lead(a[:, None], b[:, None], c[:, None], d[:, None], part)
    ids = block[:, None] * _IDS + part
    logits = tl.load(rows + row * row_stride + ids, mask=ids < width, other=0.0).to(tl.float32)
    # A bound of -inf would say that no id is left out, so no score is that low.
    score = tl.maximum(logits * tl.load(factors + row), -_LARGEST)
    margin = (tl.minimum(tl.abs(score), _LARGEST) + _STRONGEST) * _WIDENING
    tl.store(found + row * width + ids, score + tl.load(noise_bounds + lead) + margin, mask=ids < width)


@triton.jit
def _before(
    rows, row_stride, width, ids, ids_stride, logits, logits_stride, tops, factors, counts, masses,
    CHUNK: tl.constexpr, PLACES: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """Of one chunk: how many ids are ranked before each of ``PLACES`` ids, and their mass."""
    row = tl.program_id(0)
    own = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    found = _chunk_of(rows, row_stride, width, own)
    if WEIGHED:
        weights = _weights(found, tops, factors, True)
    for place in tl.static_range(PLACES):
        token = tl.load(ids + row * ids_stride + place)
        logit = tl.load(logits + row * logits_stride + place).to(tl.float32)
        before = ((found > logit) | ((found == logit) & (own < token))) & (own < width)
        at = (row * PLACES + place) * tl.num_programs(1) + tl.program_id(1)
        tl.store(counts + at, tl.sum(before.to(tl.int32), 0))
        if WEIGHED:
            tl.store(masses + at, tl.sum(tl.where(before, weights, 0.0), 0))
