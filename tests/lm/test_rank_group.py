"""A model in two processes computes what it computes in one."""

from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

from outrider.lm.heads.target_parts import TargetParts
from outrider.lm.load.model import check_split, load_model
from outrider.lm.parallel import whole_parts
from outrider.lm.parallel.rank_group import RankGroup, RankInfo, RankLost
from outrider.lm.parallel.whole_parts import gather_parts
from outrider.lm.runner import PackedLM
from speculative.errors import InvalidRequest, ModelRefused
from tests.lm.families import LENGTH, VOCABULARY, config_of, model_of
from tests.lm.ranked import GUEST, INT8, ROOM, Whole, drive
from tests.ranks import ranks

FAMILIES = ["llama", "qwen3", "gemma2", "gpt_neox", "deepseek_v3"]
TIED = "tied"
"""A model whose embeddings and output layer are one weight."""
REFUSED = {"gpt2": {}, "mistral": {"num_key_value_heads": 1}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that a pair of processes has loaded, driven, and reported on."""
    root = tmp_path_factory.mktemp("ranked")
    every = {family: REFUSED.get(family, {}) for family in [*FAMILIES, *REFUSED]}
    for family, changes in every.items():
        model_of(family, **changes).save_pretrained(root / family)
    for name in (GUEST, INT8):
        model_of("llama").save_pretrained(root / name)
    model_of("llama", tie_word_embeddings=True).save_pretrained(root / TIED)
    named = {name: root / name for name in (*every, GUEST, INT8, TIED)}
    command = ["-m", "tests.lm.ranked", str(LENGTH), *map(str, named.values())]
    with ranks(command, root / "log") as pair:
        status = [process.wait(250) for process in pair]
    assert status == [0, 0], [log.read_text() for log in root.glob("log.*")]
    return named


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_trees_of_two_ranks_have_the_logits_and_hidden_states_of_one(
    family: str, folders: dict[str, Path]
) -> None:
    expected = drive(PackedLM.load(folders[family]), LENGTH)
    found = torch.load(folders[family] / "logits.pt")
    assert_close(found, expected.logits)
    assert found.argmax(dim=-1).equal(expected.logits.argmax(dim=-1))
    assert_close(torch.load(folders[family] / "states.pt"), expected.states)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Two ranks add their halves up in another order; a wrong row is off by about 1 of its spread."""
    assert found.shape == expected.shape
    assert ((found - expected).abs() / expected.std(dim=-1, keepdim=True)).max() < 1e-4


@pytest.mark.slow
def test_a_guest_of_the_pool_keeps_its_rows_and_changes_no_logits_of_two_ranks(
    folders: dict[str, Path],
) -> None:
    expected = drive(PackedLM.load(folders[GUEST], guest=ROOM), LENGTH).logits
    assert expected.equal(drive(PackedLM.load(folders["llama"]), LENGTH).logits)
    assert torch.load(folders[GUEST] / "logits.pt").equal(torch.load(folders["llama"] / "logits.pt"))


@pytest.mark.slow
def test_two_ranks_over_int8_have_the_logits_of_one_over_int8(folders: dict[str, Path]) -> None:
    expected = drive(PackedLM.load(folders[INT8], int8_kv=True), LENGTH).logits
    found = torch.load(folders[INT8] / "logits.pt")
    # Ranks add their halves up in another order, which may choose a neighbouring code.
    assert (found - expected).norm() / expected.norm() < 5e-3
    assert not torch.equal(found, torch.load(folders["llama"] / "logits.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, TIED])
@torch.inference_mode()
def test_the_first_of_two_ranks_has_embeddings_and_output_layer_whole(
    family: str, folders: dict[str, Path]
) -> None:
    model = load_model(str(folders[family]), device="cpu", dtype="float32")
    expected = Whole.of(TargetParts.of(model))
    found = Whole(*torch.load(folders[family] / "whole.pt"))
    assert found.embedded.equal(expected.embedded)
    assert found.logits.equal(expected.logits)
    assert found.is_tied == (family == TIED), "one weight is gathered once"


def rank_of_two(rank: int) -> RankGroup:
    return RankGroup(RankInfo(rank, 2, rank), None, None, 1)


def test_layers_that_no_head_computes_with_are_not_gathered() -> None:
    model = model_of("llama")
    assert gather_parts(model, (), rank_of_two(0)) is None
    parts = gather_parts(model, ("embed",), rank_of_two(0))
    assert parts is not None
    with pytest.raises(RuntimeError, match="a layer of the target that it did not name"):
        parts.lm_head(parts.embed(torch.tensor([1])))


def test_a_rank_without_memory_for_a_whole_layer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> nn.Module:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(whole_parts, "_whole", full)
    with pytest.raises(
        RankLost, match=r"^rank 1 has no memory left for a whole copy of the target's embed, .*2 GiB"
    ):
        gather_parts(model_of("llama"), ("embed",), rank_of_two(1))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_output_layer_whose_parts_do_not_make_it_up_is_refused_on_every_rank(rank: int) -> None:
    """As of weights that are quantised, and so are no parts of one tensor."""
    model = model_of("llama")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[: VOCABULARY // 2])
    with pytest.raises(
        ModelRefused, match=r"^llama over several ranks takes no head that uses its lm_head: "
    ):
        gather_parts(model, ("embed", "lm_head"), rank_of_two(rank))


@pytest.mark.slow
def test_a_rank_keeps_its_own_heads_alone(folders: dict[str, Path]) -> None:
    assert (folders["llama"] / "heads.txt").read_text() == "1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "why"),
    [("gpt2", "gpt2 .* no tensor-parallel plan"), ("mistral", "num_key_value_heads = 1 do not divide by 2")],
)
def test_a_model_that_cannot_be_split_is_refused_by_name(
    family: str, why: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(ModelRefused, match=why) as refusal:
        check_split(config_of(family, **REFUSED[family]), 2)
    assert (folders[family] / "refused.txt").read_text() == str(refusal.value)


def test_without_torchrun_a_process_is_on_its_own() -> None:
    assert RankInfo.of({}) is None
    assert RankInfo.of({"WORLD_SIZE": "1", "RANK": "0"}) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"MASTER_PORT": ""}, "MASTER_PORT not set; start with torchrun"),
        ({"RANK": "2"}, "RANK = '2'"),
        ({"RANK": "-1"}, "RANK = '-1'"),
    ],
)
def test_an_environment_that_cannot_be_is_refused(changes: dict[str, str], why: str) -> None:
    whole = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert RankInfo.of(whole) == RankInfo(1, 2, 1)
    with pytest.raises(InvalidRequest, match=why):
        RankInfo.of(whole | changes)


class Late:
    """A store whose waits are over only when the test says so."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.looked = Event()

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def wait(self, keys: list[str], within: timedelta) -> None:
        assert self.looked.wait(100)
        self.store.wait(keys, within)


def test_the_first_rank_leaves_a_meeting_last() -> None:
    """Its end is the store's, and whoever has not looked by then would find nobody there."""
    first = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    late = Late(TCPStore("127.0.0.1", first.port, 2, is_master=False))
    groups = [
        RankGroup(RankInfo(rank, 2, rank), store, None, 100) for rank, store in enumerate((first, late))
    ]
    with ThreadPoolExecutor() as threads:
        met = [threads.submit(rank_group.meet, "loaded", timedelta(seconds=100)) for rank_group in groups]
        assert not wait(met, 0.5).done
        late.looked.set()
        assert wait(met, 100).not_done == set()
    assert [one.result() for one in met] == [None, None]


def test_a_rank_that_came_and_ended_is_not_waited_for_as_long_as_loading_takes() -> None:
    store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    store.set("outrider/loaded/here/1", "yes")
    with pytest.raises(RankLost, match="not all of 2 ranks have loaded"):
        RankGroup(RankInfo(0, 2, 0), store, None, 0.2).meet("loaded")


def test_a_rank_that_does_not_come_is_lost() -> None:
    alone = RankGroup(
        RankInfo(0, 2, 0), TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False), None, 1
    )
    with pytest.raises(RankLost, match="not all of 2 ranks have loaded"):
        alone.meet("loaded", timedelta(seconds=0.1))


def test_a_device_that_ranks_would_not_take_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="device = 'xpu:3'"):
        RankInfo(0, 2, 0).device("xpu:3")
