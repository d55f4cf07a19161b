"""Passes whose digests are made on the device, by doubles of a GPU."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.lm import transfer
from outrider.lm.device.digest import RowDigester
from outrider.lm.device.layout import MOST_BYTES, DigestLevel
from outrider.lm.graphs import backend_choice
from outrider.lm.graphs.capture import Run
from outrider.lm.outcome import Outcome, TransferCounts
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from speculative.choice import choose_token
from speculative.digest import RowAsk
from speculative.errors import EmptySupport
from speculative.history import History
from speculative.noise import PositionNoise
from speculative.params import SamplingParams
from speculative.sampling import sample_token
from tests.lm.families import VOCABULARY, model_of, twin_of
from tests.lm.test_graphs import Pair
from tests.lm.test_runner import way

CPU = torch.device("cpu")
WIDE = 128_256
HISTORY = History.of([1], 1)


READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.item", "aten.equal", "aten.unique")
"""Operations whose result the host has to wait for."""


class Watched(TorchDispatchMode):
    """Notes operations that read a device's results on the host, and copies from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.copies: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith(
            ("aten._local_scalar_dense", "aten.nonzero", "aten.item", "aten.equal", "aten.unique")
        ):
            self.reads.append(name)
        devices = {each.device.type for each in (*args, found) if isinstance(each, torch.Tensor)}
        if len(devices) > 1 and all(each.dim() for each in args if isinstance(each, torch.Tensor)):
            self.copies.append(name)
        return found


@pytest.mark.parametrize("level", DigestLevel)
@pytest.mark.parametrize("rows", [1, 65, 256])
def test_a_digest_of_a_wide_vocabulary_reads_nothing_on_the_host_and_fits_its_page(
    level: DigestLevel, rows: int
) -> None:
    device = torch.device("cuda")
    digester = RowDigester(WIDE, CPU)
    with FakeTensorMode():
        # Its constants were copied when it was made, which a machine without a GPU cannot even pretend to.
        digester._noise_bounds = torch.empty(65536, device=device)
        logits = torch.empty(rows, WIDE, dtype=torch.bfloat16, device=device)
        asks = torch.empty(rows, 3 + digester.capacity.named, dtype=torch.int64, device=device)
        with Watched() as watched:
            found = digester.compute(logits, asks, level)
    assert (watched.reads, watched.copies) == ([], [])
    assert found.device.type == "cuda"
    assert found.shape == (rows, digester.capacity.words(level))
    assert found.nbytes <= MOST_BYTES * rows


def with_digests(lm: PackedLM) -> PackedLM:
    lm.digester = RowDigester(VOCABULARY, CPU)
    return lm


def asking(sequence: SequenceRows, temperature: float) -> SequenceRows:
    """The sequence with an ask for each wanted row, whose position is the row."""
    asks = [RowAsk(11, row, temperature) for row in sequence.want]
    return SequenceRows(sequence.table, sequence.tokens, sequence.parents, sequence.want, lambda: asks)


def tokens_of(outcome: Outcome, sequences: Sequence[SequenceRows], temperature: float) -> list[int]:
    params = SamplingParams(temperature=temperature)
    positions = [row for sequence in sequences for row in sequence.want]
    return [
        choose_token(
            outcome.digest(at),
            params,
            HISTORY,
            PositionNoise(11, position, VOCABULARY) if temperature else None,
        )
        for at, position in enumerate(positions)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("static", [False, True])
def test_tokens_from_digests_are_those_of_a_model_on_the_host(static: bool, temperature: float) -> None:
    model = model_of("mistral", num_hidden_layers=2)
    ours, theirs = with_digests(PackedLM(twin_of(model))), PackedLM(model)
    for lm in (ours, theirs) if static else ():
        backend_choice.use_graphs(lm, "gathered")
    dice = random.Random(4)
    pairs = [Pair(ours, theirs, dice) for _ in range(3)]
    before, wanted = ours.transfers.planned_bytes, 0
    for _ in range(6):
        tokens = []
        for lm, given in zip(
            (ours, theirs), zip(*(pair.sequences(6) for pair in pairs), strict=True), strict=True
        ):
            sequences = [asking(each, temperature) for each in given]
            tokens.append(tokens_of(lm.forward(sequences), sequences, temperature))
        assert tokens[0] == tokens[1]
        wanted += len(tokens[0])
        for pair in pairs:
            pair.commit(dice)
    assert ours.transfers.fetched_rows == 0
    assert 0 < ours.transfers.planned_bytes - before <= MOST_BYTES * wanted
    assert theirs.transfers == TransferCounts()


def test_rows_and_hidden_states_are_gone_when_the_next_pass_begins() -> None:
    lm = with_digests(PackedLM(model_of("llama")))
    table = lm.table()
    first = lm.forward([SequenceRows(table, [1], [-1], [0])])
    table.drop_nodes()
    assert first.row(0).shape == (VOCABULARY,)
    assert lm.transfers.fetched_rows == 1
    second = lm.forward([SequenceRows(table, [2, 3], [-1, -1], [0, 1])])
    with pytest.raises(RuntimeError, match="next pass"):
        first.rows()
    assert second.rows().shape == (2, VOCABULARY)


def test_a_broken_row_is_refused_alone() -> None:
    lm = with_digests(PackedLM(model_of("llama")))
    own = lm.run_on_device

    def broken(*given: object) -> torch.Tensor:
        logits = own(*given).clone()  # type: ignore[arg-type]
        logits[1, 5] = torch.nan
        logits[2] = -torch.inf
        return logits

    lm.run_on_device = broken  # type: ignore[method-assign]
    sequences = [asking(SequenceRows(lm.table(), [at], [-1], [0]), 0.8) for at in range(4)]
    outcome = lm.forward(sequences)
    noise = PositionNoise(11, 0, VOCABULARY)
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature)
        for at, why in ((1, "logits hold nan"), (2, "every logit is -inf")):
            with pytest.raises(EmptySupport, match=why):
                choose_token(outcome.digest(at), params, HISTORY, noise)
        for at in (0, 3):
            row = outcome.row(at)
            expected = sample_token(row, params, HISTORY, noise.full())
            assert choose_token(outcome.digest(at), params, HISTORY, noise) == expected


def test_asks_of_more_rows_than_are_wanted_are_refused_before_anything_has_changed() -> None:
    lm = with_digests(PackedLM(model_of("llama")))
    table = lm.table()
    with pytest.raises(ValueError, match="wants 1 rows and asks of 2"):
        lm.forward([SequenceRows(table, [1], [-1], [0], lambda: [RowAsk()] * 2)])
    assert (table.nodes, lm.forward_calls) == (0, 0)


class Full(RowDigester):
    """A device that has memory for rows, and none for digests."""

    def compute(self, logits: torch.Tensor, asks: torch.Tensor, level: DigestLevel) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


@pytest.mark.parametrize("static", [False, True])
def test_memory_for_rows_but_not_for_digests_costs_fetched_rows_and_no_session(
    static: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of("llama")
    full, theirs = PackedLM(twin_of(model)), PackedLM(model)
    full.digester = Full(VOCABULARY, CPU)
    if static:
        backend_choice.use_graphs(full, "gathered")
    for turn in range(2):
        tokens = []
        for lm in (full, theirs):
            sequences = [asking(SequenceRows(lm.table(), [7, 8], [-1, -1], [0, 1]), 0.8) for _ in range(3)]
            tokens.append(tokens_of(lm.forward(sequences), sequences, 0.8))
        assert tokens[0] == tokens[1]
        assert (full.transfers.planned_bytes, full.transfers.fetched_rows) == (0, 6 * (turn + 1))
    assert "give the model less kv_mb" in caplog.text


class LateDevice:
    """A device with memory of its own that does nothing before the host waits, or everything at once."""

    def __init__(self, late: bool) -> None:
        self._late = late
        self._queue: list[Callable[[], object]] = []

    def device_side(self, host: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch.full_like(host, 0xA5)

    def upload(self, host: torch.Tensor, device: torch.Tensor, size: int) -> None:
        self._do(lambda: device[:size].copy_(host[:size]))
        if not self._late:
            # What was sent is on its way no longer, so the host may write what it likes.
            host[:size].fill_(0x5A)

    def capture(self, run: Run) -> Run:
        return lambda: self._do(run)

    def queued(self, work: Callable[..., object]) -> Callable[..., None]:
        return lambda *given: self._do(lambda: work(*given))

    def download(self, rows: torch.Tensor) -> torch.Tensor:
        for waiting in self._queue:
            waiting()
        self._queue.clear()
        return rows.clone()

    def _do(self, work: Callable[[], object]) -> None:
        if self._late:
            self._queue.append(work)
        else:
            work()


def test_a_device_that_copies_late_gets_what_a_device_that_copies_at_once_gets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for late in (False, True):
        device = LateDevice(late)
        with monkeypatch.context() as patch:
            for name in ("device_side", "upload", "download"):
                patch.setattr(transfer, name, getattr(device, name))
            lm = with_digests(PackedLM(model_of("mistral", num_hidden_layers=2)))
            backend_choice.use_graphs(lm, "gathered", device.capture)
            patch.setattr(lm.pool, "move", device.queued(lm.pool.move))
            found.append(decoded(lm))
    assert found[0] == found[1]


def decoded(lm: PackedLM) -> list[list[int]]:
    """Tokens that random trees of two sessions choose, with commits that move slots in between."""
    dice = random.Random(8)
    tables = [lm.table() for _ in range(2)]
    chosen = []
    for turn in range(8):
        temperature = 0.8 * (turn % 2)
        sequences = []
        for table in tables:
            count = dice.randint(1, 6)
            tokens = [dice.randrange(VOCABULARY) for _ in range(count)]
            parents = [dice.randrange(-1, row) for row in range(count)]
            sequences.append(asking(SequenceRows(table, tokens, parents, range(count)), temperature))
        chosen.append(tokens_of(lm.forward(sequences), sequences, temperature))
        for table in tables:
            table.commit(way(table.parents, table.nodes - 1))
            table.drop_nodes()
    return chosen


def test_a_rank_that_repeats_a_pass_makes_no_digest_and_copies_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = PackedLM(model_of("llama"))
    lm.digester = Full(VOCABULARY, CPU)
    asked: list[int] = []
    monkeypatch.setattr(transfer, "download", lambda rows: asked.append(1))
    table = lm.table()
    lm.repeat([SequenceRows(table, [1, 2], [-1, 0], [0, 1])])
    assert table.nodes == 2
    assert (asked, lm.transfers) == ([], TransferCounts())
