"""Compiled passes give the ids of plain decoding. Compiling takes a minute of a core for each family."""

import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.lm.autotune.threads import PassThreads, ThreadBounds
from outrider.lm.compiled import panels
from outrider.lm.compiled.container import holders
from outrider.lm.compiled.panels import panels_of, smallest_panels
from outrider.lm.device.memory import first_pool
from outrider.lm.outcome import OutcomeWants
from outrider.lm.plan import SequenceRows
from outrider.lm.runner import PackedLM
from tests.lm.families import VOCABULARY, branched, greedy_ids, logits_of, model_of, twin_of
from tests.lm.test_families import NEW, decode_with_trees

pytestmark = pytest.mark.slow

FAMILIES = ["llama", "qwen3", "gpt_neox"]
FEATURES = (1, -1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packages")


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> Iterator[tuple[PackedLM, PackedLM, torch.nn.Module]]:
    """A model with compiled passes, the same one with eager passes, and transformers' own."""
    model = model_of(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    compiled, eager = PackedLM.load(folder, threads=ThreadBounds(1, 2)), PackedLM.load(folder)
    for lm in (compiled, eager):
        lm.wants = OutcomeWants(features=FEATURES)
    compiled.compile_passes("compiled", cache)
    yield compiled, eager, twin_of(model)
    compiled.close()


def test_ids_through_trees_with_wrong_branches_are_those_of_generate(
    pair: tuple[PackedLM, PackedLM, torch.nn.Module],
) -> None:
    lm, _, plain = pair
    prompts = [[(7 * at + 3 * seed) % VOCABULARY for at in range(5 + 9 * seed)] for seed in range(3)]
    truths = [greedy_ids(plain, prompt, NEW) for prompt in prompts]  # type: ignore[arg-type]
    assert decode_with_trees(lm, prompts, truths) == truths
    assert lm.compiled is not None


def test_every_number_of_threads_computes_the_same_bits(
    pair: tuple[PackedLM, PackedLM, torch.nn.Module],
) -> None:
    lm = pair[0]
    assert lm.compiled is not None
    measured, found = lm.compiled.threads, []
    assert measured.most in (1, 2)
    for threads in (measured, PassThreads(1), PassThreads(3, 1), PassThreads(2, 17)):
        lm.compiled.threads = threads
        for rows in (1, 16, 40):
            table = lm.table()
            ids = [(11 * at) % VOCABULARY for at in range(rows)]
            outcome = lm.forward([SequenceRows(table, ids, range(-1, rows - 1), range(rows))])
            found.append(torch.from_numpy(outcome.rows()).clone())
            lm.release(table)
    lm.compiled.threads = measured
    assert all(torch.equal(one, found[at % 3]) for at, one in enumerate(found))


def test_logits_and_features_are_those_of_eager_passes(
    pair: tuple[PackedLM, PackedLM, torch.nn.Module],
) -> None:
    tree = (-1, -1, 0, 0, 1, 2, 2, 4)
    found = []
    for lm in pair[:2]:
        # Three sessions, one over blocks that lie apart and are shared; slots of one row are not wanted.
        tables = [lm.table() for _ in range(2)]
        ids = [(11 * at) % VOCABULARY for at in range(40)]
        for count, table in zip((40, 7), tables, strict=True):
            lm.forward([SequenceRows(table, ids[:count], range(-1, count - 1), ())])
            table.commit(range(count))
        tables.append(branched(lm, tables[0], ids[:35]))
        wants = (range(8), (7,), (0, 3))
        sequences = [
            SequenceRows(table, [(5 * at + 1) % VOCABULARY for at in range(8)], tree, want)
            for table, want in zip(tables, wants, strict=True)
        ]
        outcome = lm.forward(sequences)
        assert outcome.features is not None
        found.append((torch.from_numpy(outcome.rows()).clone(), outcome.features.clone()))
        for table in tables:
            lm.release(table)
    (compiled, hidden), (eager, eager_hidden) = found
    assert compiled.shape == eager.shape == (11, VOCABULARY)
    assert ((compiled - eager).abs() / eager.std(dim=-1, keepdim=True)).max() < 1e-4
    assert hidden.shape == eager_hidden.shape
    assert (hidden - eager_hidden).abs().max() < 1e-3 * eager_hidden.std()


def test_a_row_has_the_same_bits_however_many_rows_share_its_pass(
    pair: tuple[PackedLM, PackedLM, torch.nn.Module],
) -> None:
    lm = pair[0]
    tables = [lm.table() for _ in range(9)]
    one = logits_of(lm, [SequenceRows(tables[0], [3], [-1], [0])])
    many = logits_of(lm, [SequenceRows(table, [3], [-1], [0]) for table in tables[1:]])
    assert all(torch.equal(row, one[0]) for row in many)
    for table in tables:
        lm.release(table)


def test_other_threads_run_during_a_pass(
    pair: tuple[PackedLM, PackedLM, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread has to give the interpreter lock up here, so another one runs only if a pass gives it up."""
    lm = pair[0]
    assert lm.compiled is not None
    package, inputs = lm.compiled._package, []
    run = package.run
    with monkeypatch.context() as patched:
        patched.setattr(package, "run", lambda given, threads: (inputs.extend(given), run(given, threads))[1])
        table = lm.table()
        lm.forward([SequenceRows(table, range(40), range(-1, 39), range(40))])
    go, ran, deadline = threading.Event(), threading.Event(), time.monotonic() + 60
    other = threading.Thread(target=lambda: (go.wait(), ran.set()))
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        go.set()
        while not ran.is_set() and time.monotonic() < deadline:
            run(list(inputs), 0)
    finally:
        sys.setswitchinterval(interval)
    ran_in_time = time.monotonic() < deadline
    other.join()
    lm.release(table)
    assert ran_in_time


def test_a_pass_keeps_nothing_of_its_results(
    pair: tuple[PackedLM, PackedLM, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = pair[0]
    assert lm.compiled is not None
    storages: list[torch.UntypedStorage] = []
    run = lm.compiled._package.run

    def noted(given: list[torch.Tensor], threads: int) -> list[torch.Tensor]:
        found = run(given, threads)
        storages.extend(tensor.untyped_storage() for tensor in found)
        return found

    monkeypatch.setattr(lm.compiled._package, "run", noted)
    table = lm.table()
    lm.forward([SequenceRows(table, range(40), range(-1, 39), range(40))])
    lm.release(table)
    assert len(storages) == 2, "logits and hidden states"
    alone = holders(torch.zeros(1).untyped_storage())
    assert [holders(storage) for storage in storages] == [alone] * 2


def test_a_second_load_takes_the_package_from_the_cache(
    pair: tuple[PackedLM, PackedLM, torch.nn.Module], cache: Path, tmp_path: Path
) -> None:
    packages = sorted(cache.rglob("pass.so"))
    model = pair[2]
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    lm = PackedLM.load(tmp_path)
    lm.wants = OutcomeWants(features=FEATURES)
    lm.compile_passes("auto", cache)
    assert lm.compiled is not None
    assert sorted(cache.rglob("pass.so")) == packages
    profile = lm.take_profile()
    assert profile is not None
    assert profile.ms_by_rows[1] > 0
    assert lm.take_profile() is None
    lm.close()


def in_int8(folder: Path) -> PackedLM:
    """The model of a folder as `loading._keep_in_int8` leaves it."""
    lm = PackedLM.load(folder)
    lm.wants = OutcomeWants(features=FEATURES)
    lm.pool = first_pool(replace(lm.pool.layout, int8=True), 16)
    return lm


def test_compiled_passes_over_int8_give_eager_logits_and_ids_do_not_depend_on_drafts(
    pair: tuple[PackedLM, PackedLM, torch.nn.Module], cache: Path, tmp_path: Path
) -> None:
    pair[2].save_pretrained(tmp_path)  # type: ignore[operator]
    compiled, eager = in_int8(tmp_path), in_int8(tmp_path)
    packages = sorted(cache.rglob("pass.so"))
    compiled.compile_passes("auto", cache)
    assert sorted(cache.rglob("pass.so")) == packages, "one package serves floats and int8"
    assert compiled.compiled is not None
    assert compiled.numerics == "cpu float32 compiled int8-kv"
    prompts = [[(7 * at + 3 * seed) % VOCABULARY for at in range(5 + 9 * seed)] for seed in range(3)]
    text = prompts[2]
    rows = [
        logits_of(lm, [SequenceRows(lm.table(), text, range(-1, len(text) - 1), range(len(text)))])
        for lm in (compiled, eager)
    ]
    # A number in the middle between two steps may be rounded either way.
    assert (rows[0] - rows[1]).abs().max() < 0.05 * rows[1].std()
    plain = [decode_with_trees(compiled, [prompt], [[]])[0] for prompt in prompts]
    assert decode_with_trees(compiled, prompts, plain) == plain
    compiled.close()


def test_ids_behind_the_vocabulary_have_embeddings_in_compiled_passes_too(
    cache: Path, tmp_path: Path
) -> None:
    model_of("llama").save_pretrained(tmp_path)
    compiled, eager = PackedLM.load(tmp_path), PackedLM.load(tmp_path)
    rows = torch.randn(2, model_of("llama").config.hidden_size, generator=torch.Generator().manual_seed(1))
    text = [3, 7, *compiled.add_embeddings(rows)]
    assert list(eager.add_embeddings(rows)) == text[2:]
    compiled.compile_passes("compiled", cache)
    found = [
        logits_of(lm, [SequenceRows(lm.table(), text, range(-1, len(text) - 1), range(len(text)))])
        for lm in (compiled, eager)
    ]
    assert compiled.compiled is not None
    assert found[0].shape == (len(text), VOCABULARY)
    assert (found[0] - found[1]).abs().max() < 1e-4 * found[1].std()
    compiled.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_bfloat16_holds_give_the_bits_of_floats_from_half_the_memory(
    family: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_of(family).bfloat16().save_pretrained(tmp_path)
    text = [(7 * at) % VOCABULARY for at in range(30)]  # several tiles of rows
    found = []
    for made in (smallest_panels, panels_of):
        monkeypatch.setattr(panels, "smallest_panels", made)
        lm = PackedLM.load(tmp_path)
        lm.wants = OutcomeWants(features=FEATURES)
        lm.compile_passes("compiled", cache)
        outcome = lm.forward([SequenceRows(lm.table(), text, range(-1, len(text) - 1), range(len(text)))])
        assert lm.compiled is not None
        assert outcome.features is not None
        found.append((torch.from_numpy(outcome.rows()).clone(), outcome.features.clone()))
        lm.close()
    (rows, hidden), (rows_over_floats, hidden_over_floats) = found
    assert torch.equal(rows, rows_over_floats)
    assert torch.equal(hidden, hidden_over_floats)
