"""A drafter's weights: learnt from passages, kept in a folder, swapped between two passes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_service.draft_tree import Growth
from drafter_service.learning.child import carry_out
from drafter_service.learning.service import learning_of
from drafter_service.settings import DrafterSettings
from drafter_service.worker import DrafterWorker
from outrider.learning.order import LessonOrder
from outrider.learning.passages import Passage
from outrider.learning.versions import BASE, WeightVersions
from outrider.lm.load.model import load_model
from outrider.runtime.metrics import Metrics
from outrider.source.events import DecodingRequest, Follow, Outgoing, Progress, StreamClosed
from outrider.source.followed import SourceProfile
from outrider.wire.codec import SessionKey
from speculative.errors import InvalidRequest
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash
from tests.drafter.support.fake_drafter import FakeDrafter
from tests.drafter.support.lessons import order, packed, taught

PROMPT = (3, 1, 4, 1, 5)


def test_a_lesson_lowers_the_loss_and_writes_weights_that_a_further_lesson_begins_with(
    tiny_llama: Path, tiny_llama_b: Path, tmp_path: Path
) -> None:
    lessons, exams = taught(tiny_llama, 16), taught(tiny_llama, 4, seed=1)
    threads = torch.get_num_threads()
    first = carry_out(order(tiny_llama_b, tmp_path / "1"), packed(lessons, exams))
    scoring = order(
        tmp_path / "1", tmp_path / "2", version=1, candidate=2, steps=0, others={0: str(tiny_llama)}
    )
    second = carry_out(scoring, packed(lessons, exams))
    torch.set_num_threads(threads)
    assert first["losses"][1] < 0.9 * first["losses"][0]
    assert sorted(first["accepted"]) == [0, 1]
    assert second["accepted"][1] == first["accepted"][1], "read back as it was written"
    assert second["accepted"][0] == [32] * 4, "the target agrees with itself everywhere"
    assert not (tmp_path / "2").exists()
    assert json.loads(scoring.to_json())["steps"] == 0
    assert LessonOrder.from_json(scoring.to_json()) == scoring
    before, after = (
        load_model(str(name), device="cpu", dtype="float32") for name in (tiny_llama_b, tmp_path / "1")
    )
    changed = {
        name
        for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True)
        if not torch.equal(old, new)
    }
    assert changed
    assert not any("norm" in name for name in changed), "compiled passes hold norms as constants"


def test_a_lesson_on_passages_of_different_lengths_reads_the_places_that_were_taught(
    tiny_llama: Path, tmp_path: Path
) -> None:
    whole = taught(tiny_llama, 3)
    cut = [
        Passage(
            one.tenant,
            one.session,
            0,
            one.ids[:length],
            one.top_ids[: length - 8],
            one.top_logprobs[: length - 8],
            one.wrong[: length - 8],
        )
        for one, length in zip(whole, (12, 40, 25), strict=True)
    ]
    threads = torch.get_num_threads()
    found = carry_out(order(tiny_llama, tmp_path / "1", steps=0), packed([], cut))
    torch.set_num_threads(threads)
    assert found["accepted"][0] == [4, 32, 17]


def test_versions_survive_a_restart_and_half_written_ones_go(tmp_path: Path) -> None:
    folder = tmp_path / "learnt"
    versions = WeightVersions(folder, "given", "tenant:ann", "abc")
    assert (versions.begin(), versions.begin(), versions.begin()) == (1, 2, 3)
    for version in (1, 2):
        (folder / str(version)).mkdir()
        versions.use(version)
    (folder / "3.partial").mkdir()
    (folder / "3").mkdir()
    with pytest.raises(InvalidRequest, match="is in use"):
        WeightVersions(folder, "given", "tenant:ann", "abc")
    versions.close()
    again = WeightVersions(folder, "given", "tenant:ann", "abc")
    assert (again.state.current, again.state.previous, again.earlier) == (2, 1, [BASE, 1])
    assert (again.name_of(BASE), again.name_of(2)) == ("given", str(folder / "2"))
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["1", "2"]
    assert again.begin() == 4, "a number is not used again"
    assert folder.stat().st_mode & 0o077 == 0
    again.use(BASE)
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["2"]
    again.give_up()
    again.close()
    assert again.earlier == []


@pytest.mark.parametrize(
    ("owner", "base"), [("tenant:bob", "abc"), ("public", "abc"), ("tenant:ann", "other")]
)
def test_weights_of_one_owner_or_model_are_not_used_for_another(
    tmp_path: Path, owner: str, base: str
) -> None:
    first = WeightVersions(tmp_path, "given", "tenant:ann", "abc")
    first.begin()
    first.close()
    with pytest.raises(InvalidRequest, match="holds weights of tenant:ann"):
        WeightVersions(tmp_path, "given", owner, base)


@pytest.mark.parametrize(
    "given",
    [
        {"learn_dir": Path("weights")},
        {"learn_from": ("ann",)},
        {"learn_every": 512},
        {"learn_steps": 9},
        {"learn_duty": 0.5},
    ],
)
def test_a_drafter_that_learns_from_nobody_refuses_to_be_told_how(given: dict[str, Any]) -> None:
    (flag,) = (f"--{name.replace('_', '-')}" for name in given)
    with pytest.raises(InvalidRequest, match=f"{flag} is given without --learn.* or drop {flag}"):
        learning_of(DrafterSettings(model="m", **given), Metrics("drafter"))


def test_all_settings_of_learning_that_nothing_uses_are_named_and_empty_ones_pass() -> None:
    with pytest.raises(InvalidRequest, match=r"--learn-cores, --learn-rate are given without --learn"):
        learning_of(DrafterSettings(model="m", learn_rate=0.1, learn_cores=2), Metrics("drafter"))
    empty: dict[str, Any] = {"learn": "", "learn_dir": "", "learn_from": ""}
    assert learning_of(DrafterSettings(model="m", **empty), Metrics("drafter")) is None


@pytest.mark.parametrize("place", ["a file", "a file/learnt", "learnt"])
def test_a_folder_that_cannot_be_written_to_is_refused_with_what_to_do(tmp_path: Path, place: str) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "learnt" / "lock").mkdir(parents=True)
    with pytest.raises(InvalidRequest, match=r"cannot keep weights \(.*give a --learn-dir that"):
        WeightVersions(tmp_path / place, "given", "tenant:ann", "abc")


@pytest.mark.parametrize("state", ["{", '{"owner": 1}', '{"owner":"tenant:ann","base":"abc","current":7}'])
def test_a_folder_that_makes_no_sense_is_refused_with_what_to_do(tmp_path: Path, state: str) -> None:
    (tmp_path / "state.json").write_text(state)
    for _ in range(2):  # a refusal leaves no lock behind
        with pytest.raises(InvalidRequest, match="remove"):
            WeightVersions(tmp_path, "given", "tenant:ann", "abc")


def test_a_folder_of_other_files_is_refused_and_keeps_them(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir(parents=True)
    (tmp_path / "photos" / "a.txt").write_text("precious")
    with pytest.raises(InvalidRequest, match=r"holds 'photos' and no state\.json: give --learn-dir an empty"):
        WeightVersions(tmp_path, "given", "tenant a", "base")
    assert (tmp_path / "photos" / "a.txt").read_text() == "precious"


def test_folders_beside_the_versions_are_never_removed(tmp_path: Path) -> None:
    folder = tmp_path / "learnt"
    versions = WeightVersions(folder, "given", "tenant a", "base")
    Path(versions.name_of(versions.begin())).mkdir()
    for name in ("notes", "7"):
        (folder / name).mkdir()
    versions.drop()
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["7", "notes"]
    assert folder.stat().st_mode & 0o777 == 0o700
    versions.close()


def test_an_owner_is_public_or_a_tenant() -> None:
    assert DrafterSettings(model="m", learn="tenant:ann").learn == "tenant:ann"
    for wrong in ("ann", "tenant:", "Public"):
        with pytest.raises(ValueError, match="give public, or tenant:NAME"):
            DrafterSettings(model="m", learn=wrong)


class Swapping:
    """A worker over a fake drafter, and what it sent."""

    def __init__(self, request_for: Callable[..., DecodingRequest]) -> None:
        self.first = FakeDrafter()
        self.sent: list[Fragment] = []
        self.request_for = request_for
        profile = SourceProfile("drafter", "fake", readable_ids=24, max_length=200)
        self.worker = DrafterWorker(
            self.first,
            profile,
            self._take,
            growth=Growth(children=2, scale=1.0, floor=0.05, depth=3),
            nodes_per_pass=2,
            chunk=3,
        )

    def _take(self, outgoing: dict[int, Outgoing]) -> None:
        self.sent += [fragment for what in outgoing.values() for _, fragment in what.drafts]

    def take(self, event: Any) -> None:
        self.worker.submit(event)
        self.worker.take_in(wait=False)

    def settle(self) -> list[Fragment]:
        self.sent.clear()
        while self.worker.work():
            pass
        return list(self.sent)


class OtherDrafter(FakeDrafter):
    """The fake drafter with other weights."""

    def logits(self, ids: Any) -> Any:
        return super().logits((*ids, 7))


@pytest.fixture
def swapping(request_for: Callable[..., DecodingRequest]) -> Swapping:
    return Swapping(request_for)


def test_after_a_swap_sessions_read_their_ids_again_and_draft_with_the_new_weights(
    swapping: Swapping,
) -> None:
    worker, other = swapping.worker, OtherDrafter()
    swapping.take(Follow(0, 1, SessionKey("t", "s"), swapping.request_for(PROMPT)))
    before = swapping.settle()
    assert worker.replace(other, "fake (learnt 1)") is swapping.first
    assert all(cache.closed for cache in swapping.first.caches)
    (session,) = worker.roster
    assert (session.unread, worker.gauges()["ids_waiting"]) == (len(PROMPT), len(PROMPT))
    after = swapping.settle()
    assert other.passes[:2] == [3, 2], "read in chunks, as a prompt is"
    assert before[0].tokens[0] == int(swapping.first.logits(PROMPT).argmax())
    assert after[0].tokens[0] == int(other.logits(PROMPT).argmax())
    assert worker.profile.model == "fake (learnt 1)"
    counts = worker.counts
    assert (counts.swaps, counts.reread_ids) == (1, len(PROMPT))
    assert 0 < counts.swap_seconds <= counts.reread_seconds


def test_a_session_that_is_swapped_amid_a_prompt_goes_on(swapping: Swapping) -> None:
    swapping.take(Follow(0, 1, SessionKey("t", "s"), swapping.request_for(PROMPT)))
    swapping.worker.work()
    other = OtherDrafter()
    swapping.worker.replace(other, "other")
    swapping.take(Progress(0, 1, len(PROMPT), (9, 2), prefix_hash([*PROMPT, 9, 2])))
    sent = swapping.settle()
    assert sent[0].base == len(PROMPT) + 2
    assert sent[0].tokens[0] == int(other.logits([*PROMPT, 9, 2]).argmax())


def test_a_session_kept_over_a_broken_stream_comes_back_after_a_swap(swapping: Swapping) -> None:
    key = SessionKey("t", "s")
    swapping.take(Follow(0, 1, key, swapping.request_for(PROMPT)))
    swapping.settle()
    swapping.take(StreamClosed(0))
    other = OtherDrafter()
    swapping.worker.replace(other, "other")
    swapping.take(Follow(1, 1, key, swapping.request_for(PROMPT, epoch=8)))
    sent = swapping.settle()
    assert sent[0].tokens[0] == int(other.logits(PROMPT).argmax())


def test_a_drafter_of_another_size_is_not_swapped_in(swapping: Swapping) -> None:
    swapping.take(Follow(0, 1, SessionKey("t", "s"), swapping.request_for(PROMPT)))
    with pytest.raises(ValueError, match="cannot take the place"):
        swapping.worker.replace(FakeDrafter(max_length=100), "short")
    assert swapping.worker.drafter is swapping.first
    assert swapping.settle()
