"""A verifier that loads heads from checkpoints: ids stay the same, usage names them, misfits are refused."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import eventually, serving
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider.lm.compiled.head_kernel import CompiledHead
from outrider.lm.heads.eagle import EagleHead
from outrider.lm.heads.look_ahead import LookAheadEmbeddings
from outrider.lm.heads.medusa import MedusaHeads
from outrider.lm.heads.published import write_head
from outrider.lm.heads.target_parts import TargetParts
from outrider.lm.runner import PackedLM
from outrider.v1 import explain_pb2
from speculative.errors import InvalidRequest, OutriderError
from speculative.params import SamplingParams
from tests.lm.compiled_heads import kernel_folder
from tests.lm.random_heads import shaken
from verifier_service.loading import load_target
from verifier_service.proposers.batched import all_needs
from verifier_service.proposers.planning import ADVICE, plan_proposers
from verifier_service.settings import VerifierSettings

NEW = 40
PROMPTS = [(5, 17, 40), (60, 2, 33, 33, 33, 9, 80), tuple(range(2, 90))]
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.95)
HEADS = ("medusa", "mine", "pass")


@pytest.fixture(scope="module")
def heads(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of random heads for the tiny target."""
    folder = tmp_path_factory.mktemp("heads")
    target = TargetParts.of(AutoModelForCausalLM.from_pretrained(tiny_llama, local_files_only=True))
    layer = LlamaConfig.from_pretrained(tiny_llama, num_hidden_layers=1)
    write_head(shaken(MedusaHeads(target, 3)), folder / "medusa", torch.float32)
    write_head(shaken(EagleHead(target, layer)), folder / "eagle", torch.float32)
    write_head(shaken(LookAheadEmbeddings(target, 3)), folder / "pass", torch.float32)
    return folder


def settings_of(tiny_llama: Path, heads: Path) -> dict[str, Any]:
    three = f"{heads / 'medusa'},mine={heads / 'eagle'},{heads / 'pass'}"
    return {"model": str(tiny_llama), "heads": three}


@pytest.fixture
def target(tiny_llama: Path, heads: Path) -> PackedLM:
    return load_target(VerifierSettings(**settings_of(tiny_llama, heads)))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_ids_with_heads_equal_ids_without_and_usage_names_the_heads(
    target: PackedLM, params: SamplingParams, tiny_llama: Path, heads: Path
) -> None:
    settings = settings_of(tiny_llama, heads)
    async with serving(target, prefill_chunk=32, budget="fixed", **settings) as verifier:
        expected = [await verifier.generate(prompt, params=params, new=NEW) for prompt in PROMPTS]
        sources, drafted = [(name, "") for name in HEADS], set[str]()
        for prompt, plain in zip(PROMPTS, expected, strict=True):
            alone = await verifier.generate(prompt, params=params, new=NEW, sources=sources)
            assert alone.ids == plain.ids
            drafted |= set(alone.usage.drafted_by_source)
        assert drafted == set(HEADS)
        together = await asyncio.gather(
            *(verifier.generate(prompt, params=params, new=NEW, sources=sources) for prompt in PROMPTS)
        )
        assert [answer.ids for answer in together] == [plain.ids for plain in expected]
        assert verifier.metric("proposers_muted") == 0


async def test_rounds_name_what_each_head_drafted(target: PackedLM, tiny_llama: Path, heads: Path) -> None:
    named: set[str] = set()
    async with serving(target, budget="fixed", **settings_of(tiny_llama, heads)) as verifier:
        for prompt in PROMPTS:
            request = verifier.request(prompt, new=NEW, sources=[(name, "") for name in HEADS])
            await verifier.open(request)
            answer = await verifier.read(request)
            await eventually(lambda: verifier.metric("num_requests_running") == 0)
            found = await verifier.stub.Explain(explain_pb2.ExplainRequest(key=request.key), timeout=100)
            drafted = drafted_by(found.incarnations[0])
            assert drafted == answer.usage.drafted_by_source
            named |= drafted.keys()
    assert named == set(HEADS)


def drafted_by(explanation: explain_pb2.Incarnation) -> Counter[str]:
    """Nodes that each source drafted over all rounds, by its name."""
    drafted: Counter[str] = Counter()
    for each in explanation.rounds:
        for share in each.by_source:
            drafted[explanation.source_names[share.source - 1]] += share.drafted
    return drafted


async def test_a_compiled_head_is_served_as_an_eager_one_is(
    tiny_llama: Path, heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[int] = []
    level = CompiledHead.level

    def counted(head: CompiledHead, planes: Any, drafts: Any) -> Any:
        levels.append(len(drafts))
        return level(head, planes, drafts)

    monkeypatch.setattr(CompiledHead, "level", counted)
    monkeypatch.setattr(PackedLM, "compile_passes", lambda *given: None)  # which takes a minute
    settings = {"model": str(tiny_llama), "heads": f"mine={heads / 'eagle'}", "cache_dir": kernel_folder()}
    compiled = load_target(VerifierSettings(**settings))
    async with serving(compiled, budget="fixed", passes="auto", **settings) as verifier:
        for params in (GREEDY, SAMPLED, SamplingParams(temperature=0.9, repetition_penalty=1.2)):
            for prompt in PROMPTS:
                plain = await verifier.generate(prompt, params=params, new=NEW)
                drafted = await verifier.generate(prompt, params=params, new=NEW, sources=[("mine", "")])
                assert drafted.ids == plain.ids
                assert drafted.usage.drafted_by_source
        assert len(levels) > len(PROMPTS)
        assert verifier.metric("proposers_muted") == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": 64}, "its width is 64, the target's 32"),
        ({"vocab_size": 5}, "its vocabulary has 5 ids, the target's 96"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_before_the_target_is_loaded(
    change: dict[str, Any], says: str, tiny_llama: Path, heads: Path, tmp_path: Path
) -> None:
    raw = json.loads((heads / "eagle" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(OutriderError, match=says):
        load_target(VerifierSettings(model=str(tiny_llama), heads=str(tmp_path)))


def test_two_heads_of_one_name_are_refused(tiny_llama: Path, heads: Path) -> None:
    twice = f"{heads / 'eagle'},eagle={heads / 'eagle'}"
    with pytest.raises(OutriderError, match="two sources are called 'eagle'; rename the head: NAME="):
        plan_proposers(VerifierSettings(model=str(tiny_llama), heads=twice))


@pytest.mark.parametrize(
    ("learning", "tenant"),
    [({"learn": "tenant:ann"}, "ann"), ({"learn": "public", "learn_from": "ann"}, ""), ({}, "")],
)
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_the_plan_of_a_head_that_learns_names_the_tenant_whose_passes_the_head_is_shown(
    kind: str, learning: dict[str, Any], tenant: str, tiny_llama: Path, heads: Path
) -> None:
    settings = VerifierSettings(model=str(tiny_llama), heads=str(heads / kind), **learning)
    assert plan_proposers(settings)[kind].needs.tenant == tenant


@pytest.mark.parametrize("name", ["eagle", "medusa", "auto", "nosuch"])
def test_a_name_that_is_no_head_is_refused_with_the_flag(
    name: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.lm.heads.config.snapshot_download", not_there)
    with pytest.raises(InvalidRequest) as refused:
        plan_proposers(VerifierSettings(model=str(tiny_llama), heads=name))
    said = str(refused.value)
    assert said.startswith(f"--heads {name}: model {name!r} was not found")
    assert said.endswith(f"; {ADVICE}")
    assert "only `outrider up` knows eagle and medusa" in ADVICE


def test_a_folder_that_is_no_head_is_refused_with_the_flag(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan_proposers(VerifierSettings(model=str(tiny_llama), heads=str(tmp_path)))
    assert str(refused.value) == f"--heads {tmp_path}: {str(tmp_path)!r} is not a head: it has no config.json"


def not_there(*_: Any, **__: Any) -> str:
    raise FileNotFoundError("no such repository")


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (["medusa"], {"lm_head"}),
        (["eagle"], {"embed", "lm_head"}),
        (["medusa", "eagle"], {"embed", "lm_head"}),
    ],
)
def test_heads_beside_ranks_name_the_layers_that_the_first_rank_has_to_gather(
    names: list[str], parts: set[str], tiny_llama: Path, heads: Path
) -> None:
    settings = VerifierSettings(
        model=str(tiny_llama), heads=",".join(str(heads / name) for name in names), ranks=2
    )
    assert set(all_needs(plan_proposers(settings).values()).parts) == parts


def test_a_target_that_is_split_over_ranks_takes_no_look_ahead_tokens(tiny_llama: Path, heads: Path) -> None:
    settings = VerifierSettings(model=str(tiny_llama), heads=str(heads / "pass"), ranks=2)
    with pytest.raises(
        InvalidRequest, match="beside ranks = 2: the target itself reads its look-ahead tokens"
    ):
        plan_proposers(settings)
