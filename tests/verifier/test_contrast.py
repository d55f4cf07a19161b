"""Contrastive decoding: ids are those of two transformers models without drafts, cache or batch."""

import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from core_driver import CoreDriver
from grpc.aio import AioRpcError
from harness import serving

from outrider.lm.contrast import ContrastingLM
from outrider.lm.kv.blocks import BLOCK
from outrider.lm.kv.pool import SlotPool
from outrider.lm.runner import PackedLM
from speculative.errors import InvalidRequest
from speculative.history import History
from speculative.noise import gumbel
from speculative.params import SamplingParams
from speculative.sampling import sample_token
from tests.lm.families import VOCABULARY, model_of, twin_of
from verifier_service.engine.session import Session
from verifier_service.loading import load_amateur
from verifier_service.proposers.small_model import SmallModelProposer
from verifier_service.settings import VerifierSettings

NEW = 20
GREEDY = SamplingParams(temperature=0.0, contrast_strength=0.5)
SAMPLED = SamplingParams(temperature=0.8, contrast_strength=0.5, contrast_plausibility=0.02)
STRONG = SamplingParams(temperature=1.1, contrast_strength=2.0, contrast_plausibility=0.01, top_p=0.95)
PENALISED = SamplingParams(
    temperature=0.9, contrast_strength=1.0, repetition_penalty=1.2, frequency_penalty=0.2, top_k=12
)
PLAIN = SamplingParams(temperature=0.8)
KINDS = {"greedy": GREEDY, "sampled": SAMPLED, "strong": STRONG, "penalised": PENALISED}
EACH = pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)


@cache
def weights(seed: int) -> Any:
    return model_of("llama", seed=seed, max_position_embeddings=128)


@cache
def amateur_weights() -> Any:
    """The expert's weights with much noise, so that the two often agree and often do not."""
    model = twin_of(weights(0))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def logits_of(model: Any, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        found: np.ndarray = model(torch.tensor([ids])).logits[0, -1].double().numpy()
    return found


def decoded(
    expert: Any, amateur: Any, prompt: tuple[int, ...], params: SamplingParams, seed: int, new: int
) -> list[int]:
    """Plain contrastive decoding with transformers, from the first id anew for every token."""
    ids = list(prompt)
    for _ in range(new):
        own = logits_of(expert, ids)
        scores = own.copy()
        if params.contrast is not None:
            strength, plausibility = params.contrast
            scores = (1 + strength) * own - strength * logits_of(amateur, ids)
            scores[own < own.max() + np.log(plausibility)] = -np.inf
        noise = None if params.greedy else gumbel(seed, len(ids), len(scores))
        ids.append(sample_token(scores, params, History.of(ids, len(prompt)), noise))
    return ids[len(prompt) :]


@cache
def reference(prompt: tuple[int, ...], params: SamplingParams, seed: int, new: int) -> list[int]:
    return decoded(weights(0), amateur_weights(), prompt, params, seed, new)


def packed(model: Any, blocks: int) -> PackedLM:
    lm = PackedLM(twin_of(model))
    lm.pool = SlotPool(lm.pool.layout, max_slots=blocks * BLOCK, initial_slots=2 * BLOCK)
    return lm


class Contrasting:
    """Sessions over a pair of models, with a small model and a lookup that draft."""

    def __init__(self, blocks: int = 256, **limits: Any) -> None:
        self.lm = ContrastingLM(packed(weights(0), blocks), packed(amateur_weights(), 2))
        drafter = SmallModelProposer(packed(amateur_weights(), 256), VOCABULARY)
        self.driver = CoreDriver(self.lm, {"small-model": drafter}, **limits)
        self._expected: list[tuple[Session, list[int]]] = []

    def open(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        seed: int = 0,
        new: int = NEW,
        sources: tuple[str, ...] = ("small-model", "lookup"),
    ) -> Session:
        session = self.driver.open(prompt, new, params, seed, sources=sources)
        self._expected.append((session, reference(prompt, params, seed, new)))
        return session

    def check(self) -> None:
        self.driver.run()
        for session, expected in self._expected:
            assert self.driver.generated(session) == expected

    def accepted(self) -> int:
        """Tokens of all sessions that were drafted."""
        tokens = sum(len(self.driver.generated(session)) for session, _ in self._expected)
        return tokens - sum(rows.final for run in self.driver.passes for _, rows in run.parts)


def random_prompt(seed: int, length: int = 20) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCABULARY), k=length))


def test_the_reference_contrasts() -> None:
    for params in KINDS.values():
        alone = SamplingParams(temperature=params.temperature)
        assert reference(random_prompt(1), params, 3, NEW) != reference(random_prompt(1), alone, 3, NEW)


@EACH
def test_ids_without_drafts_are_those_of_two_models_of_transformers(params: SamplingParams) -> None:
    contrasting = Contrasting(prefill_chunk=7)
    contrasting.open(random_prompt(1, 40), params, 3, sources=())
    contrasting.check()


@EACH
def test_drafts_of_any_source_change_no_id(params: SamplingParams) -> None:
    contrasting = Contrasting(prefill_chunk=7)
    for seed, prompt in enumerate([random_prompt(1, 40), random_prompt(2), (1, 2, 3), (7,)]):
        contrasting.open(prompt, params, seed)
    contrasting.check()
    assert contrasting.accepted() > 0


def test_sessions_that_contrast_and_plain_ones_share_their_steps() -> None:
    contrasting = Contrasting()
    for seed, params in enumerate([GREEDY, PLAIN, SAMPLED, PLAIN, PENALISED, STRONG]):
        contrasting.open(random_prompt(seed), params, seed)
    contrasting.check()
    mixed = [run for run in contrasting.driver.passes if len({s.contrast is None for s, _ in run.parts}) == 2]
    assert len(mixed) > 5


def test_only_sessions_that_contrast_cost_a_pass_of_the_amateur() -> None:
    contrasting = Contrasting()
    contrasting.open(random_prompt(1), PLAIN)
    contrasting.check()
    assert contrasting.lm.amateur.forward_calls == 0


@pytest.mark.parametrize("blocks", [256, 12])
def test_a_cached_prefix_is_found_by_sessions_that_contrast_alone(blocks: int) -> None:
    """In a large pool the blocks are copied into one run, in a small one they are shared."""
    contrasting = Contrasting(blocks)
    prompt = random_prompt(4, 50)
    found = []
    for params in (PLAIN, GREEDY, SAMPLED, PLAIN):
        session = contrasting.open(prompt, params, 2)
        contrasting.check()
        found.append(contrasting.driver.finish_of(session).usage.cached_tokens)
    assert found == [0, 0, 48, 48]


def test_sessions_that_lose_their_blocks_start_over_with_the_same_ids() -> None:
    contrasting = Contrasting(blocks=9)
    for seed in range(4):
        contrasting.open(random_prompt(seed, 20), [GREEDY, SAMPLED][seed % 2], seed, new=30)
    contrasting.check()
    assert contrasting.driver.core.kv.released > 4, "no session was preempted"


@EACH
def test_a_session_continues_elsewhere_with_the_same_ids(params: SamplingParams) -> None:
    prompt, unpenalised = (
        random_prompt(6),
        SamplingParams(temperature=params.temperature, contrast_strength=params.contrast_strength),
    )
    whole = reference(prompt, unpenalised, 5, NEW)
    contrasting = Contrasting()
    session = contrasting.driver.open((*prompt, *whole[:7]), NEW - 7, unpenalised, 5)
    contrasting.driver.run()
    assert contrasting.driver.generated(session) == whole[7:]


def test_an_id_that_the_amateur_does_not_know_is_never_chosen() -> None:
    narrow = model_of("llama", seed=3, vocab_size=40, max_position_embeddings=128)
    lm = ContrastingLM(packed(weights(0), 64), PackedLM(narrow))
    driver = CoreDriver(lm, {"small-model": SmallModelProposer(packed(weights(0), 64), VOCABULARY)})
    flat = SamplingParams(temperature=3.0, contrast_strength=0.3, contrast_plausibility=0.001)
    sessions = [driver.open((3, 5, 7), NEW, flat, seed, sources=("small-model",)) for seed in range(4)]
    driver.run()
    ids = [id_ for session in sessions for id_ in driver.generated(session)]
    assert len(ids) == 4 * NEW
    assert max(ids) < 40


async def test_a_served_request_has_the_ids_of_two_models_of_transformers(
    tiny_llama: Path, tiny_llama_b: Path
) -> None:
    from transformers import AutoModelForCausalLM

    models = [
        AutoModelForCausalLM.from_pretrained(path).float().eval() for path in (tiny_llama, tiny_llama_b)
    ]
    prompt = (5, 9, 30, 41)
    async with serving(PackedLM.load(tiny_llama), amateur=str(tiny_llama_b)) as verifier:
        for params in (GREEDY, SAMPLED):
            answer = await verifier.generate(prompt, params=params, sources=[("lookup", "")], new=16)
            expected = decoded(*models, prompt, params, 7, 16)
            assert answer.ids == (expected[: expected.index(1) + 1] if 1 in expected else expected)


async def test_it_is_refused_by_name_without_an_amateur(tiny_llama: Path) -> None:
    async with serving(PackedLM.load(tiny_llama)) as verifier:
        with pytest.raises(AioRpcError, match=r"contrast_strength is 0.5, but the verifier of .* no amateur"):
            await verifier.generate((5, 9), params=GREEDY)


async def test_what_cannot_be_contrasted_is_refused_by_name(tiny_llama: Path, tiny_llama_b: Path) -> None:
    async with serving(PackedLM.load(tiny_llama), amateur=str(tiny_llama_b)) as verifier:
        request = verifier.request((5, 9), params=GREEDY, score_prompt=True)
        request.logprobs.SetInParent()
        with pytest.raises(AioRpcError, match="score_prompt is true beside contrast_strength"):
            await verifier.open(request)
        request = verifier.request((5, 9))
        request.sampling.contrast_plausibility = 0.2
        with pytest.raises(AioRpcError, match=r"contrast_plausibility is 0.2 without a contrast_strength"):
            await verifier.open(request)


def test_an_amateur_of_another_tokenizer_is_refused(tiny_llama: Path, tiny_writer: Path) -> None:
    settings = VerifierSettings(model=str(tiny_llama), amateur=str(tiny_writer), cache_dir=None)
    with pytest.raises(InvalidRequest, match="has another tokenizer than the target"):
        load_amateur(settings, PackedLM.load(tiny_llama))


def test_an_amateur_that_cannot_be_loaded_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    settings = VerifierSettings(model=str(tiny_llama), amateur=str(tmp_path / "none"), cache_dir=None)
    with pytest.raises(InvalidRequest, match=r"amateur = '.*none' cannot be used: "):
        load_amateur(settings, PackedLM.load(tiny_llama))


def test_an_amateur_beside_a_target_on_a_gpu_is_refused(tiny_llama_b: Path) -> None:
    target: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device("cuda")))
    settings = VerifierSettings(model="any", amateur=str(tiny_llama_b), cache_dir=None)
    with pytest.raises(InvalidRequest, match="on CPUs alone"):
        load_amateur(settings, target)


def test_an_amateur_beside_ranks_is_refused(tiny_llama: Path, tiny_llama_b: Path) -> None:
    settings = VerifierSettings(model=str(tiny_llama), amateur=str(tiny_llama_b), ranks=2, cache_dir=None)
    with pytest.raises(InvalidRequest, match="beside ranks = 2"):
        load_amateur(settings, PackedLM.load(tiny_llama))


def test_an_amateur_beside_a_target_that_verifies_chains_is_refused(tiny_llama_b: Path) -> None:
    pool = SimpleNamespace(chains_only=True)
    target: Any = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu")), pool=pool)
    settings = VerifierSettings(model="any", amateur=str(tiny_llama_b), cache_dir=None)
    with pytest.raises(InvalidRequest, match="which verifies chains"):
        load_amateur(settings, target)
