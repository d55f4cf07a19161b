"""Families without a packed tree pass are right through chains, or refused by name."""

import random

import pytest

from outrider.lm.chains.chain_lm import UNNAMED_CONTEXT, ChainLM
from outrider.lm.chains.layers import CallSlots
from outrider.lm.chains.table import MOST_OWED, ChainTable
from outrider.lm.kv.table import SlotTable
from outrider.lm.plan import SequenceRows
from speculative.errors import ModelRefused
from tests.lm.families import VOCABULARY, greedy_ids, logits_of, model_of, twin_of

STATES = [
    "qwen3_next",
    "qwen3_5_text",
    "mamba2",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "nemotron_h",
    "lfm2",
]
BY_ROWS = ["mamba", "falcon_mamba", "jamba"]
"""Their forward takes up a state for single rows alone."""
STATELESS = ["bloom", "falcon", "mpt", "gptj", "codegen", "gpt_neo", "llama4_text", "phimoe"]
REFUSED = {
    "recurrent_gemma": "differs from its own eager forward",
    "bert": "differs from its own eager forward",
}
NEW = 24
LONG = [(7 * at + 3) % VOCABULARY for at in range(45)]
SHORT = [5, 11, 23, 42, 2]


SEED = 2
"""Of weights with which no family repeats one id."""


def checked(family: str) -> ChainLM:
    lm = ChainLM(model_of(family, seed=SEED), kv_mb=16)
    lm.settle(lm.first_trial(), 1)
    return lm


def read(lm: ChainLM, table: SlotTable, ids: list[int]) -> None:
    """Computes a prompt in two chunks, of which the first ends within a block."""
    half = len(ids) // 4
    for part in (ids[:half], ids[half:]):
        lm.forward([SequenceRows(table, part, range(-1, len(part) - 1), ())])
        table.commit(range(len(part)))


def decode(lm: ChainLM, prompts: list[list[int]], truths: list[list[int]]) -> list[list[int]]:
    """Greedy decoding of all prompts in one batch; every step drafts a chain that is right for a while."""
    dice = random.Random(0)
    tables = [lm.table() for _ in prompts]
    for table, prompt in zip(tables, prompts, strict=True):
        read(lm, table, prompt[:-1])
    made = continued(lm, tables, prompts, truths, dice)
    for table in tables:
        lm.release(table)
    return made


def continued(
    lm: ChainLM,
    tables: list[SlotTable],
    prompts: list[list[int]],
    truths: list[list[int]],
    dice: random.Random,
) -> list[list[int]]:
    made: list[list[int]] = [[] for _ in prompts]
    while live := [at for at, ids in enumerate(made) if len(ids) < NEW]:
        chains = []
        for at in live:
            right = truths[at][len(made[at]) : len(made[at]) + dice.randint(0, 5)]
            wrong = [dice.randrange(VOCABULARY) for _ in range(dice.randint(0, 3))]
            chains.append([(prompts[at] + made[at])[-1], *right, *wrong])
        sequences = [
            SequenceRows(tables[at], chain, range(-1, len(chain) - 1), range(len(chain)))
            for at, chain in zip(live, chains, strict=True)
        ]
        rows = logits_of(lm, sequences).split([len(chain) for chain in chains])
        for at, chain, own in zip(live, chains, rows, strict=True):
            chosen = own.argmax(-1).tolist()
            count = 1
            while count < len(chain) and chain[count] == chosen[count - 1]:
                count += 1
            tables[at].keep(range(count))
            made[at] += chosen[:count]
    return [ids[:NEW] for ids in made]


FAST = {"qwen3_next", "mamba2", "lfm2", "falcon_h1", "jamba", "bloom", "llama4_text"}
ALL = [
    pytest.param(family, marks=() if family in FAST else pytest.mark.slow)
    for family in STATES + BY_ROWS + STATELESS
]


@pytest.mark.parametrize("family", ALL)
def test_greedy_ids_through_chains_equal_generate(family: str) -> None:
    model = model_of(family, seed=SEED)
    prompts = [LONG, SHORT]
    truths = [greedy_ids(twin_of(model), prompt, NEW) for prompt in prompts]
    assert any(len(set(truth)) > 3 for truth in truths), "a test on a constant would show nothing"
    lm = checked(family)
    assert lm.passes == ("chains by rows" if family in BY_ROWS else "chains")

    assert decode(lm, prompts, truths) == truths

    assert lm.pool.used_slots == 0
    lm.pool.check_integrity()


@pytest.mark.parametrize("family", ["mamba2", "lfm2", "jamba", "bloom"])
def test_a_session_goes_on_from_a_cached_prefix_and_from_its_state(family: str) -> None:
    model = model_of(family, seed=SEED)
    truth = greedy_ids(twin_of(model), LONG, NEW)
    lm = checked(family)
    first = lm.table()
    read(lm, first, LONG[:-1])
    found = lm.pool.resumable(first.blocks[: (len(LONG) - 1) // 16])
    assert len(found) == 2
    for begin in (SlotTable.adopt, SlotTable.copy_of):
        table = lm.table()
        getattr(table, begin.__name__)(found)
        rest = LONG[32:-1]
        lm.forward([SequenceRows(table, rest, range(-1, len(rest) - 1), ())])
        table.keep(range(len(rest)))

        assert continued(lm, [table], [LONG], [truth], random.Random(1)) == [truth]
        lm.release(table)
    lm.release(first)


@pytest.mark.parametrize("family", REFUSED)
def test_what_chains_cannot_serve_rightly_is_refused_by_its_type(family: str) -> None:
    with pytest.raises(ModelRefused, match=REFUSED[family]) as refused:
        checked(family)

    assert refused.value.model_type == family


def test_a_model_that_attends_nowhere_needs_no_named_context_and_no_memory_for_slots() -> None:
    lm = ChainLM(model_of("mamba2"), kv_mb=1)

    assert lm.max_length == UNNAMED_CONTEXT
    assert lm.pool.layout.slot_bytes == 0
    assert lm.pool.max_slots > lm.pool.most_tables * lm.max_length


def test_branches_are_an_error() -> None:
    lm = ChainLM(model_of("lfm2"), kv_mb=1)
    table = lm.table()

    with pytest.raises(ValueError, match="chains, not branches"):
        lm.forward([SequenceRows(table, [1, 2, 3], [-1, 0, 0], [0])])

    lm.release(table)
    assert lm.pool.used_slots == 0


def test_too_little_memory_for_the_states_of_a_few_sessions_is_refused_with_what_is_needed() -> None:
    model = model_of("mamba2", state_size=2048)
    with pytest.raises(ModelRefused, match=r"need kv_mb = \d+ or more; kv_mb is 1"):
        ChainLM(model, kv_mb=1)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "lfm2", "jamba"])
def test_a_session_whose_drafts_all_fail_runs_what_it_owes_before_that_grows(family: str) -> None:
    model = model_of(family, seed=SEED)
    truth = greedy_ids(twin_of(model), SHORT, NEW)
    lm = checked(family)
    table = lm.table()
    assert isinstance(table, ChainTable)
    read(lm, table, SHORT[:-1])
    made: list[int] = []
    owed = []
    for right in truth:
        chain = [(SHORT + made)[-1], (right + 1) % VOCABULARY, 3]
        logits = logits_of(lm, [SequenceRows(table, chain, range(-1, 2), range(3))])
        table.keep(range(1))
        made.append(int(logits[0].argmax()))
        owed.append(len(table.owed))
    assert made == truth
    assert max(owed) == MOST_OWED
    assert owed.count(1) == 2, "once at the beginning, and once what was owed had run"


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "lfm2", "bloom"])
def test_bfloat16_is_served_within_its_own_rounding(family: str) -> None:
    lm = ChainLM(model_of(family, seed=SEED).bfloat16(), kv_mb=16)

    lm.settle(lm.first_trial(), 1)

    assert lm.passes == "chains"
    assert lm.numerics == "cpu bfloat16 chains"


def test_a_kept_state_keeps_no_storage_of_keys_and_values() -> None:
    lm = checked("falcon_h1")
    table = lm.table()
    assert isinstance(table, ChainTable)
    read(lm, table, LONG)

    assert table.state is not None
    held = [part for layer in table.state for part in vars(layer).values()]
    assert not any(isinstance(part, CallSlots) for part in held)
    lm.release(table)
