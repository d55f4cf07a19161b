"""Heads that learn behind a real server: lessons in child processes, swaps amid sessions, the same ids."""

import asyncio
import itertools
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from harness import Answer, Verifier, serving

from outrider.learning import learner as learner_module
from outrider.learning.judge import AcceptanceGain, LessonVerdict, Score
from outrider.learning.learner import Learner
from outrider.learning.lesson import CoreMeter, LessonResult
from outrider.learning.versions import WeightVersions
from outrider.lm.heads.hydra import HydraHeads, HydraSizes
from outrider.lm.heads.look_ahead import LookAheadEmbeddings
from outrider.lm.heads.medusa import MedusaHeads
from outrider.lm.heads.published import write_head
from outrider.runtime.metrics import Metrics
from outrider.v1 import common_pb2
from speculative.errors import InvalidRequest
from speculative.params import SamplingParams
from tests.in_time import in_time
from tests.lm.random_heads import shaken
from training.heads import untrained
from training.heads.frozen import FrozenTarget
from verifier_service.learning import service
from verifier_service.learning.service import ServingHead, learning_of
from verifier_service.loading import load_target
from verifier_service.proposers import host, hosted
from verifier_service.proposers.batched import BatchedProposer
from verifier_service.proposers.price import ProposerPrice
from verifier_service.settings import VerifierSettings

GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8)
WAYS = (GREEDY, SAMPLED)
PROMPTS = [tuple(row) for row in np.random.default_rng(3).integers(2, 96, (6, 9)).tolist()] * 8
"""Traffic that repeats itself, so that a random target's text can be foreseen."""
NEW = 30
NO_GAIN = AcceptanceGain(0.0, 0.0, 0.0, 0)
NONE = np.zeros(1, dtype=np.int64)
NO_SCORE = Score({0: NONE, 1: NONE}, NONE, NONE, [""])


@pytest.fixture(scope="module")
def heads(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of heads for the tiny target, which know nothing yet."""
    folder = tmp_path_factory.mktemp("heads")
    frozen = FrozenTarget.load(str(tiny_llama), "cpu")
    target = frozen.parts
    torch.manual_seed(0)
    write_head(shaken(MedusaHeads(target, 3)), folder / "medusa", torch.float32)
    write_head(untrained.eagle(frozen), folder / "eagle", torch.float32)
    write_head(shaken(LookAheadEmbeddings(target, 3)), folder / "pass", torch.float32)
    write_head(HydraHeads(target, HydraSizes(3, prefix=True)), folder / "hydra", torch.float32)
    return folder


@pytest.fixture(autouse=True)
def time_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lessons go on beside sessions, and heads draft in every round, however busy this machine is."""
    monkeypatch.setattr(CoreMeter, "idle", lambda *_: 8.0)
    monkeypatch.setattr(ProposerPrice, "begins", lambda *_: True)
    monkeypatch.setattr(ProposerPrice, "deepens", lambda *_: True)
    monkeypatch.setattr(hosted, "SLOW_S", 60.0)
    monkeypatch.setattr(host, "STUCK_S", 60.0)


class School:
    """A verifier whose head learns, its lessons begun by hand."""

    def __init__(self, verifier: Verifier, kind: str) -> None:
        self.verifier, self.kind = verifier, kind
        self.learning = verifier.server._learning
        self.sessions = itertools.count()

    async def ask(self, prompt: tuple[int, ...], params: SamplingParams, **asked: Any) -> Answer:
        """The answer with drafts of the head, to tenant ann unless `tenant` says otherwise."""
        key = common_pb2.SessionKey(tenant=asked.pop("tenant", "ann"), session=f"s{next(self.sessions)}")
        given = {"new": NEW, "learn": True, "sources": [(self.kind, "")], "key": key, **asked}
        return await self.verifier.generate(prompt, params=params, **given)

    async def plain(self, prompt: tuple[int, ...], params: SamplingParams, **asked: Any) -> list[int]:
        return (await self.ask(prompt, params, sources=(), learn=False, **asked)).ids

    async def traffic(self) -> float:
        """Sessions to learn from, and to score with; returns how many tokens the head had right."""
        before = self.verifier.nodes(self.kind, "accepted")
        await asyncio.gather(*(self.ask(prompt, GREEDY) for prompt in PROMPTS))
        return self.verifier.nodes(self.kind, "accepted") - before

    def held(self) -> float:
        return self.verifier.metric("learning_bytes")

    async def lesson(self) -> LessonVerdict | None:
        found: LessonVerdict | None = await asyncio.to_thread(self.learning._learner.run_lesson)
        return found

    def outcomes(self) -> dict[str, float]:
        found = {}
        for family in self.verifier.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == "outrider_verifier_lessons_total" and sample.value:
                    found[sample.labels["outcome"]] = sample.value
        return found


@asynccontextmanager
async def school(
    tiny_llama: Path, heads: Path, folder: Path, kind: str, **settings: Any
) -> AsyncIterator[School]:
    given: dict[str, Any] = {
        "model": str(tiny_llama),
        "heads": str(heads / kind),
        "learn": "tenant:ann",
        "learn_dir": folder,
        "learn_every": 10**9,
        "learn_steps": 60,
        "learn_rate": 2e-2,
        "learn_duty": 1.0,
        "device": "cpu",
        "threads": 1,
        "budget": "fixed",
        "prefix_cache": True,
        "lease_s": 600.0,
        "cache_dir": None,
        **settings,
    }
    target = load_target(VerifierSettings(**given, passes="eager"))
    async with serving(target, **given) as verifier:
        yield School(verifier, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
async def test_a_lesson_makes_the_head_better_while_sessions_run_and_ids_stay_plain(
    kind: str, tiny_llama: Path, heads: Path, tmp_path: Path
) -> None:
    prompts = [(5, 17, 40), tuple(range(2, 40))]
    async with school(tiny_llama, heads, tmp_path / "learnt", kind) as taught:
        verifier = taught.verifier
        plain = [await taught.plain(prompt, way) for prompt in prompts for way in WAYS]

        async def answers() -> list[Answer]:
            return await asyncio.gather(*(taught.ask(prompt, way) for prompt in prompts for way in WAYS))

        untaught = await taught.traffic()
        assert [one.ids for one in await answers()] == plain
        assert taught.held() > 0
        lesson = asyncio.create_task(taught.lesson())
        during = 0
        while not lesson.done():
            assert [one.ids for one in await answers()] == plain
            during += 1
            await asyncio.sleep(0.1)
        verdict = await lesson
        in_time(during > 1, "the lesson was over before")
        assert verdict is not None
        assert (verdict.version, verdict.reason) == (1, "better")
        assert taught.outcomes() == {"better": 1.0}
        assert verifier.metric("weights_version") == verifier.metric("swaps_total") == 1
        assert verifier.metric("learning_acceptance") > 0
        assert [one.ids for one in await answers()] == plain
        assert await taught.traffic() > untaught + 10
        assert verifier.metric("proposers_muted") == 0
    async with school(tiny_llama, heads, tmp_path / "learnt", kind) as again:
        assert again.verifier.metric("weights_version") == 1, "learnt weights survive a restart"
        assert await again.traffic() > untaught + 10


async def test_text_that_the_owner_may_not_keep_is_never_collected(
    tiny_llama: Path, heads: Path, tmp_path: Path
) -> None:
    async with school(tiny_llama, heads, tmp_path / "learnt", "medusa") as taught:
        for asked in ({"tenant": "mallory"}, {"tenant": ""}, {"learn": False}):
            await taught.ask(PROMPTS[0], GREEDY, **asked)
            assert taught.held() == 0, asked
        await taught.ask(PROMPTS[0], GREEDY)
        assert taught.held() > 0


async def test_a_head_of_one_tenant_drafts_for_that_tenant_alone(
    tiny_llama: Path, heads: Path, tmp_path: Path
) -> None:
    async with school(tiny_llama, heads, tmp_path / "learnt", "eagle") as taught:
        plain = await taught.plain(PROMPTS[0], GREEDY)
        others = await taught.ask(PROMPTS[0], GREEDY, tenant="mallory")
        assert others.ids == plain
        assert taught.verifier.nodes("eagle", "offered") == 0
        assert (await taught.ask(PROMPTS[0], GREEDY)).ids == plain
        assert taught.verifier.nodes("eagle", "offered") > 0


async def test_a_public_head_learns_from_its_teachers_and_drafts_for_all(
    tiny_llama: Path, heads: Path, tmp_path: Path
) -> None:
    public = {"learn": "public", "learn_from": "bob"}
    async with school(tiny_llama, heads, tmp_path / "learnt", "medusa", **public) as taught:
        await taught.ask(PROMPTS[0], GREEDY, tenant="ann")
        assert taught.verifier.nodes("medusa", "offered") > 0
        assert taught.held() == 0
        await taught.ask(PROMPTS[0], GREEDY, tenant="bob")
        assert taught.held() > 0


@pytest.mark.slow
async def test_lessons_that_fail_or_harm_leave_the_head_as_it_is(
    tiny_llama: Path, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with school(tiny_llama, heads, tmp_path / "learnt", "medusa") as taught:
        learner, proposers = taught.learning._learner, taught.verifier.server._engine.core.proposers
        await taught.traffic()
        assert (await taught.lesson()) is not None
        assert taught.outcomes() == {"better": 1}
        serving_head = proposers._by_name["medusa"].proposer

        plan = learner._plan
        learner._plan = replace(plan, steps=2, rate=1.0)
        assert (await taught.lesson()) is not None
        assert taught.outcomes() == {"better": 1, "worse": 1}
        learner._plan = replace(plan, memory_mb=70)
        assert (await taught.lesson()) is None
        assert taught.outcomes()["memory"] == 1
        learner._plan = plan
        monkeypatch.setattr(learner_module, "judge", lambda *_: LessonVerdict(4, "better", NO_GAIN))
        monkeypatch.setattr(taught.learning, "_made", refuse)
        assert (await taught.lesson()) is None
        assert taught.outcomes()["unloadable"] == 1
        assert proposers._by_name["medusa"].proposer is serving_head
        assert taught.verifier.metric("weights_version") == taught.verifier.metric("swaps_total") == 1
        assert [path.name for path in (tmp_path / "learnt").iterdir() if path.is_dir()] == ["1"]


async def test_weights_that_traffic_turned_against_make_way_for_the_given_ones(
    tiny_llama: Path, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with school(tiny_llama, heads, tmp_path / "learnt", "eagle") as taught:
        learner = taught.learning._learner
        monkeypatch.setattr(learner, "_teach", lambda *_: LessonResult(NO_SCORE, []))
        monkeypatch.setattr(learner._versions, "begin", lambda: 1)
        shutil.copytree(heads / "eagle", tmp_path / "learnt" / "1")
        for version in (1, 0):
            verdict = LessonVerdict(version, "earlier_better", NO_GAIN)
            monkeypatch.setattr(learner_module, "judge", lambda *_, verdict=verdict: verdict)
            before = taught.verifier.server._engine.core.proposers._by_name["eagle"].proposer
            assert (await taught.lesson()) == verdict
            assert taught.verifier.server._engine.core.proposers._by_name["eagle"].proposer is not before
            assert taught.verifier.metric("weights_version") == version
        assert taught.verifier.metric("swaps_total") == 2
        assert taught.verifier.metric("swap_seconds_total") > 0


def refuse(*_: Any) -> Any:
    raise InvalidRequest("it does not load")


async def test_learnt_weights_that_do_not_load_make_way_for_the_given_ones(
    tiny_llama: Path, heads: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "learnt"
    async with school(tiny_llama, heads, folder, "medusa") as taught:
        versions = taught.learning._learner._versions
        versions.begin()
        (folder / "1").mkdir()
        (folder / "1" / "config.json").write_text('{"medusa_num_heads": 3}')
        versions.use(1)
    async with school(tiny_llama, heads, folder, "medusa") as again:
        assert again.verifier.metric("weights_version") == 0
        await again.ask(PROMPTS[0], GREEDY)
        assert again.verifier.nodes("medusa", "offered") > 0


def test_only_a_version_that_was_swapped_in_is_shown_as_the_one_that_serves() -> None:
    swaps: list[Any] = []
    shown: list[int] = []
    head = ServingHead("medusa", refuse, swaps.append, lambda: 0, shown.append)
    for version in (1, 2, 3):
        head.swap(cast(BatchedProposer, f"head {version}"), version)
    taken, refused, given_up = (swap.before for swap in swaps)
    assert shown == []
    taken.set_result("head 0")
    refused.set_exception(ValueError("it has other needs"))
    given_up.cancel()
    assert shown == [1]


async def test_a_learner_that_lingers_holds_up_nothing_else_that_stops_and_keeps_its_folder(
    tiny_llama: Path, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work, may_end = threading.Event(), threading.Event()

    def lingers(_: Any) -> None:
        at_work.set()
        may_end.wait(60)

    monkeypatch.setattr(learner_module, "CHECK_S", 0.01)
    monkeypatch.setattr(Learner, "is_due", True)
    monkeypatch.setattr(Learner, "run_lesson", lingers)
    folder = tmp_path / "learnt"
    async with school(tiny_llama, heads, folder, "medusa") as taught:
        server, learner = taught.verifier.server, taught.learning._learner
        told: list[bool] = []
        closed: list[str] = []
        monkeypatch.setattr(server._readers, "drain", lambda: told.append(learner._stopped.is_set()))
        monkeypatch.setattr(server._target, "close", lambda: closed.append("target"))
        monkeypatch.setattr(server._grammars, "close", lambda: closed.append("grammars"))
        assert await asyncio.to_thread(at_work.wait, 60)
        try:
            async with asyncio.timeout(30):
                await server.stop(0.0)
            assert told == [True], "the learner is told before sessions are waited for"
            assert not server._engine._thread.is_alive()
            assert closed == ["target", "grammars"]
            with pytest.raises(InvalidRequest, match="is in use"):
                WeightVersions(folder, "head", "tenant:ann", "base")
        finally:
            may_end.set()
        await asyncio.to_thread(learner._thread.join, 60)
        WeightVersions(folder, "head", "tenant:ann", "base").close()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"heads": ""}, "there is no head to learn: name one in heads, or leave learn out"),
        ({"heads": "a,b"}, "beside 2 heads: only one learns; name one in heads"),
        ({"ranks": 2}, "beside ranks = 2: a head learns on one rank alone; leave one of them out"),
        ({"learn": "ann"}, "give public, or tenant:NAME"),
    ],
)
def test_settings_under_which_no_head_can_learn_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        VerifierSettings(**{"model": "m", "heads": "a", "learn": "tenant:ann", **given})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"learn_dir": None}, "give --learn-dir"),
        ({"learn": None}, "--learn-dir is given without --learn"),
        ({"learn": "public"}, "give --learn-from A,B"),
    ],
)
def test_what_learning_lacks_is_said_before_the_target_is_loaded(
    given: dict[str, Any], says: str, tiny_llama: Path, heads: Path, tmp_path: Path
) -> None:
    settings = {"model": str(tiny_llama), "heads": str(heads / "medusa"), "learn": "tenant:ann"}
    settings |= {"learn_dir": str(tmp_path), "device": "cpu", **given}
    said = {name: value for name, value in settings.items() if value is not None}
    with pytest.raises(InvalidRequest, match=says):
        learning_of(VerifierSettings(**said), Metrics("verifier"))


def test_an_empty_owner_switches_off_what_a_file_or_a_variable_says(tiny_llama: Path, tmp_path: Path) -> None:
    settings = VerifierSettings(model=str(tiny_llama), learn="", learn_dir=tmp_path, learn_every=9)
    assert learning_of(settings, Metrics("verifier")) is None


def test_a_head_on_a_gpu_does_not_learn(
    tiny_llama: Path, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "find_device", lambda _: torch.device("cuda"))
    settings = {"model": str(tiny_llama), "heads": str(heads / "medusa"), "learn": "tenant:ann"}
    with pytest.raises(InvalidRequest, match="give --device cpu, or drop --learn"):
        learning_of(VerifierSettings(**settings, learn_dir=str(tmp_path)), Metrics("verifier"))


def test_a_kind_of_head_that_cannot_learn_is_refused_by_name(
    tiny_llama: Path, heads: Path, tmp_path: Path
) -> None:
    settings = {"model": str(tiny_llama), "learn": "tenant:ann", "learn_dir": str(tmp_path), "device": "cpu"}
    for name, says in (
        ("pass", "a pass head cannot learn"),
        ("hydra", "a head with a prefix layer cannot learn"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            learning_of(VerifierSettings(heads=str(heads / name), **settings), Metrics("verifier"))
