"""Heads trained for a tiny random target: stopped anywhere, resumed, refused where something does not fit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from outrider.cli.past_file import write_past
from outrider.folder_lock import FolderInUse, FolderLock
from outrider.lm.heads.config import HeadConfig
from outrider.lm.heads.eagle3 import Eagle3Head
from outrider.lm.heads.medusa import MedusaHeads
from outrider.lm.heads.pair_head import PairHead
from outrider.lm.heads.published import load_head
from outrider.tokens import TokenTable
from outrider.v1 import retrieval_pb2
from speculative.errors import InvalidRequest
from tests.cli.inside import ended
from tests.training.conftest import TEXTS, quiet
from training.heads import acceptance, unrolled, untrained
from training.heads.divergence import DIVERGENCES
from training.heads.frozen import FrozenTarget
from training.heads.job import distil
from training.heads.kinds import KINDS
from training.heads.lessons import Lessons
from training.heads.loss import LOSSES, HeadLoss
from training.heads.recipe import DistilOptions
from training.heads.rows import read_text
from training.loop import Interrupted

WEIGHTS = {
    "medusa": "medusa_lm_head.safetensors",
    "blockwise": "medusa_lm_head.safetensors",
    "hydra": "hydra_lm_head.safetensors",
    "eagle": "model.safetensors",
    "eagle3": "model.safetensors",
    "mtp": "model.safetensors",
    "pass": "model.safetensors",
    "lm": "model.safetensors",
    "block": "model.safetensors",
}


def killed_at(stage: str, count: int) -> Callable[..., None]:
    """A progress that asks the run to stop once a stage has come this far."""

    def show(name: str, done: int, total: int, remark: str = "") -> None:
        if (name, done) == (stage, count):
            if stage == "training":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                raise KeyboardInterrupt

    return show


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "eagle" else pytest.param(kind, marks=pytest.mark.slow) for kind in sorted(WEIGHTS)],
)
def test_a_head_stopped_in_every_stage_ends_with_the_weights_of_one_that_was_not(
    options: DistilOptions, kind: str, small: Path, tmp_path: Path
) -> None:
    options = replace(options, drafter=str(small), data="target")
    whole = replace(options, kind=kind, out=tmp_path / "whole", work=tmp_path / "whole.work")
    distil(whole, TEXTS, quiet)
    stopped = replace(options, kind=kind)
    for stage, count in (("target's text", 32), ("features", 32), ("training", 2), ("training", 4)):
        with pytest.raises((Interrupted, KeyboardInterrupt)):
            distil(stopped, TEXTS, killed_at(stage, count))
    distil(stopped, TEXTS, quiet)
    one, other = (load_file(made.out / WEIGHTS[kind]) for made in (whole, stopped))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_training_raises_held_out_acceptance_and_the_head_loads(options: DistilOptions) -> None:
    trained = replace(options, kind="medusa", steps=150, rate=2e-2, held_tokens=24)
    found = distil(trained, TEXTS, quiet)["acceptance"]["greedy"]
    assert found["after"]["by_place"][0] > found["before"]["by_place"][0]
    target = FrozenTarget.load(options.target, "cpu")
    load_head(HeadConfig.read(str(options.out)), target.parts)


@pytest.mark.slow
def test_a_small_model_learns_to_draft_and_is_written_as_a_model(options: DistilOptions, small: Path) -> None:
    trained = replace(options, kind="lm", drafter=str(small), steps=80, rate=1e-2, held_tokens=24)
    found = distil(trained, TEXTS, quiet)["acceptance"]["greedy"]
    assert found["after"]["acceptance_length"] > found["before"]["acceptance_length"]
    written = FrozenTarget.load(str(options.out), "cpu")
    assert written.parts.shape == FrozenTarget.load(str(small), "cpu").parts.shape


def test_the_card_names_command_data_and_tenants(
    options: DistilOptions, tmp_path: Path, target: Path
) -> None:
    past = exported(tmp_path, target, "acme", [[1, 2, 3] * 40, [4, 5] * 40])
    distil(replace(options, past=(past,)), TEXTS, quiet)
    card = (options.out / "README.md").read_text()
    assert f"outrider distil text --kind eagle --target {options.target}" in card
    assert "`acme` (2 past outputs that `learn` allowed)" in card
    assert "**Deletion.**" in card
    assert "24 documents" in card


def exported(folder: Path, target: Path, tenant: str, outputs: list[list[int]]) -> Path:
    """The file that `outrider memory export` writes of a worker with these outputs."""
    digest = TokenTable.from_json((target / "tokenizer.json").read_text()).digest

    class Worker:
        def ExportPast(self, _request: object, timeout: float) -> Iterator[retrieval_pb2.ExportPastResponse]:
            yield retrieval_pb2.ExportPastResponse(outputs=len(outputs), tokenizer_digest=digest)
            for number, ids in enumerate(outputs):
                output = retrieval_pb2.PastOutput(session=f"s{number}", ids=ids)
                yield retrieval_pb2.ExportPastResponse(output=output)

    write_past(folder / f"{tenant}.jsonl", tenant, Worker())
    return folder / f"{tenant}.jsonl"


def test_exported_outputs_that_were_cut_off_or_are_foreign_are_refused(
    options: DistilOptions, tmp_path: Path, target: Path
) -> None:
    path = exported(tmp_path, target, "acme", [[1, 2, 3] * 40, [4, 5] * 40])
    whole = path.read_text()
    damaged = {
        "cut off": whole[: whole.index("\n", whole.index("\n") + 1) + 1],
        "damaged": whole[:-10],
        "another tokenizer": whole.replace('"tokenizer": "', '"tokenizer": "0'),
        "beyond the target's vocabulary": whole.replace("[1, 2", "[1, 40000"),
    }
    for what, text in damaged.items():
        path.write_text(text)
        with pytest.raises(InvalidRequest, match=what):
            distil(replace(options, past=(path,)), TEXTS, quiet)


def test_a_checkpoint_that_was_cut_off_is_refused_and_features_are_made_anew(options: DistilOptions) -> None:
    with pytest.raises(Interrupted):
        distil(options, TEXTS, killed_at("training", 3))
    features, checkpoint = options.work / "features-0000.npy", options.work / "eagle.pt"
    before = features.read_bytes()
    features.write_bytes(before[: len(before) // 2])
    checkpoint.write_bytes(checkpoint.read_bytes()[:500])
    with pytest.raises(InvalidRequest, match=r"eagle.pt cannot be read .* remove it"):
        distil(options, TEXTS, quiet)
    assert features.read_bytes() == before


@pytest.mark.parametrize(
    ("data", "rows"),
    [("fixed", (64, 0, 0)), ("target", (0, 64, 0)), ("drafter", (0, 0, 64)), ("mixed", (48, 8, 8))],
)
def test_rows_come_from_the_sources_that_data_names(
    options: DistilOptions, target: Path, data: str, rows: tuple[int, int, int]
) -> None:
    chosen = replace(options, data=data, written=0.25, drafter=str(target), steps=1)
    result = distil(chosen, TEXTS, quiet)
    assert tuple(result[f"{name}_tokens"] // 32 for name in ("fixed", "written", "drafted")) == rows
    assert (f"half `{target}` wrote" in (options.out / "README.md").read_text()) == (rows[2] > 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "mine"}, f"--kind 'mine' is not one of {', '.join(KINDS)}"),
        ({"kind": "lm"}, "--kind lm needs --drafter"),
        ({"kind": "block"}, "--kind block needs --drafter"),
        ({"kind": "block", "depth": 1, "drafter": "small"}, "--depth 1: a block of one token"),
        ({"boost_of": "first"}, "--boost-of trains a second small model: give --kind lm, not eagle"),
        ({"boost": 2.0}, "--boost 2.0 is not a weight"),
        ({"data": "mine"}, "--data 'mine'"),
        ({"data": "drafter"}, "--data drafter needs --drafter"),
        ({"written": 1.5}, "--written 1.5 is not a share"),
        ({"divergence": "wasserstein"}, "--divergence 'wasserstein'"),
        ({"text": ()}, "nothing to train on"),
        ({"window": 4}, "--window 4 is below 16"),
        ({"depth": 20}, "--depth 20 is more than a quarter"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(
    options: DistilOptions, change: dict[str, object], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        distil(replace(options, **change), TEXTS, quiet)  # type: ignore[arg-type]


def test_a_second_run_in_a_work_folder_is_refused_while_the_first_has_it(options: DistilOptions) -> None:
    with closing(FolderLock(options.work)), pytest.raises(FolderInUse, match=r"another process \(pid"):
        distil(options, TEXTS, quiet)
    assert not options.out.exists()
    distil(options, TEXTS, quiet)


def test_a_work_folder_of_another_run_is_refused_by_what_differs(options: DistilOptions) -> None:
    distil(options, TEXTS, quiet)
    with pytest.raises(InvalidRequest, match="the text has changed"):
        distil(options, TEXTS[1:], quiet)
    with pytest.raises(InvalidRequest, match="--steps was 6 and is now 7"):
        distil(replace(options, steps=7), TEXTS, quiet)


def test_documents_that_nearly_copy_held_out_prompts_are_left_out(
    options: DistilOptions, tmp_path: Path
) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"prompt": TEXTS[0][:40], "continuation": TEXTS[0][40:]}) + "\n")
    distil(replace(options, held_out=held), TEXTS, quiet)
    assert "1 documents left out" in (options.out / "README.md").read_text()


def test_past_outputs_that_nearly_copy_held_out_prompts_are_left_out(
    options: DistilOptions, tmp_path: Path, target: Path
) -> None:
    table = TokenTable.from_json((target / "tokenizer.json").read_text())
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"prompt": TEXTS[0][:40], "continuation": TEXTS[0][40:]}) + "\n")
    copied, other = list(table.encode(TEXTS[0])), list(range(80))
    past = exported(tmp_path, target, "acme", [copied, other])
    text = read_text(table, 299, [], (past,), held, window=32)
    assert text.past.tolist() == [*other, 299]
    assert (text.tenants, text.outputs_left_out) == ({"acme": 1}, 1)
    distil(replace(options, held_out=held, past=(past,)), TEXTS[1:], quiet)
    card = (options.out / "README.md").read_text()
    assert "1 past outputs left out because they nearly copy held-out text" in card
    assert "`acme` (1 past outputs that `learn` allowed)" in card


PAIR_HEADS: dict[str, Callable[[FrozenTarget], PairHead]] = {
    "eagle": untrained.eagle,
    "eagle3": lambda target: untrained.eagle3(target, torch.arange(0, 300, 3)),
    "mtp": untrained.mtp,
}


@pytest.mark.parametrize("kind", PAIR_HEADS)
def test_simulated_steps_are_those_of_a_head_that_drafts_one_token_after_the_other(
    kind: str, target: Path
) -> None:
    frozen = FrozenTarget.load(str(target), "cpu")
    torch.manual_seed(1)
    head = PAIR_HEADS[kind](frozen)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(300, (1, 12))
    features = frozen.states(ids, head.reads).read
    depth, root = 3, 5
    tokens = ids[:, 1 : root + 2]
    with torch.no_grad():
        given = head.fuse((features if features.ndim == 4 else features[:, :, None])[:, : root + 1])
        simulated = list(unrolled.unrolled(head, ids, features, depth, torch.tensor([root])))
        for step, (logits, _) in enumerate(simulated, start=1):
            expected = head(tokens, given)
            torch.testing.assert_close(logits[0, 0], head.logits(expected[:, -1])[0], atol=1e-4, rtol=1e-4)
            given = torch.cat([given, expected[:, -1:]], dim=1)
            tokens = torch.cat([tokens, ids[:, root + step + 1 : root + step + 2]], dim=1)


def test_heads_of_one_state_begin_as_the_target_s_lm_head(target: Path) -> None:
    frozen = FrozenTarget.load(str(target), "cpu")
    ids = torch.randint(300, (2, 12), generator=torch.Generator().manual_seed(5))
    roots = torch.arange(8)
    own = frozen.parts.lm_head(frozen.features(ids))[:, roots]
    for begin in (untrained.medusa, untrained.blockwise, untrained.hydra):
        head = begin(frozen, 2)
        with torch.no_grad():
            (logits, _), *_ = unrolled.unrolled(head, ids, frozen.features(ids), 2, roots)
        torch.testing.assert_close(logits, own, atol=1e-3, rtol=1e-3)


def test_heads_of_blockwise_decoding_are_served_with_the_target_s_own_lm_head(options: DistilOptions) -> None:
    distil(replace(options, kind="blockwise"), TEXTS, quiet)
    written = load_file(options.out / "medusa_lm_head.safetensors")
    target = FrozenTarget.load(options.target, "cpu")
    width = target.parts.shape.width
    assert {tensor.shape for tensor in written.values()} == {(width, width), (width,)}
    head = load_head(HeadConfig.read(str(options.out)), target.parts)
    state = torch.randn(1, width)
    assert isinstance(head, MedusaHeads)
    for place, blocks in enumerate(head.heads):
        torch.testing.assert_close(head.logits(place, state), target.parts.lm_head(blocks(state)))


def test_an_eagle_3_head_drafts_the_most_frequent_ids_of_its_text_alone(
    options: DistilOptions, target: Path
) -> None:
    distil(replace(options, kind="eagle3", draft_vocabulary=20), TEXTS, quiet)
    frozen = FrozenTarget.load(str(target), "cpu")
    head = load_head(HeadConfig.read(str(options.out)), frozen.parts)
    assert isinstance(head, Eagle3Head)
    assert head.drafted_ids is not None
    logits = head.logits(torch.randn(3, 32))
    assert logits.isfinite().nonzero()[:, 1].view(3, 20)[0].tolist() == head.drafted_ids.tolist()
    rows = np.concatenate([np.load(path) for path in sorted(options.work.glob("written-*.npy"))])
    common = np.bincount(rows.ravel()).argsort()[-5:]
    assert set(common.tolist()) <= set(head.drafted_ids.tolist())
    assert "--draft-vocabulary 20" in (options.out / "README.md").read_text()


@pytest.mark.parametrize("divergence", LOSSES)
def test_a_head_is_not_blamed_for_ids_that_it_cannot_draft(divergence: str, target: Path) -> None:
    frozen = FrozenTarget.load(str(target), "cpu")
    head = untrained.eagle3(frozen, torch.arange(10))
    ids = torch.randint(10, 300, (2, 16), generator=torch.Generator().manual_seed(5))
    states = frozen.states(ids, head.reads)
    loss = HeadLoss(divergence, 2, 0.0, 1.0, noise=0.0).of_batch(
        head, frozen, ids, states.last.clone(), None, read=states.read.clone()
    )
    loss.backward()
    assert loss.isfinite()
    assert all(found.grad is None or found.grad.isfinite().all() for found in head.parameters())


def test_a_draft_vocabulary_is_refused_for_other_kinds(options: DistilOptions) -> None:
    with pytest.raises(InvalidRequest, match=r"--draft-vocabulary is for --kind eagle3, not eagle"):
        distil(replace(options, draft_vocabulary=20), TEXTS, quiet)


def test_divergences_are_zero_for_equal_distributions_alone() -> None:
    logits, others = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    assert {*DIVERGENCES, "cross-entropy"} == set(LOSSES)
    for apart in DIVERGENCES.values():
        torch.testing.assert_close(apart(logits, logits + 3.0), torch.zeros(5), atol=1e-5, rtol=0)
        assert (apart(logits, others) > 0.01).all()
    assert (DIVERGENCES["tvd"](logits * 100, others * 100) <= 1).all()


def test_divergences_are_those_of_the_papers() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    mean = (p + q) / 2

    def kl(of: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (of * (of / other).log()).sum()

    wanted = {
        "forward-kl": kl(p, q),
        "reverse-kl": kl(q, p),
        "jsd": (kl(p, mean) + kl(q, mean)) / 2,
        "tvd": torch.tensor(0.4),
    }
    for name, apart in DIVERGENCES.items():
        torch.testing.assert_close(apart(p.log(), q.log()), wanted[name])


def test_an_eagle_head_learns_hidden_states_of_the_places_that_weigh_something_and_of_no_others(
    target: Path,
) -> None:
    frozen = FrozenTarget.load(str(target), "cpu")
    torch.manual_seed(3)
    head = untrained.eagle(frozen)
    ids = torch.randint(300, (2, 12))
    true = frozen.features(ids).clone().requires_grad_()
    loss = HeadLoss("forward-kl", 3, 1.0, 1.0, noise=0.0)

    def of(weights: torch.Tensor | None) -> torch.Tensor:
        return loss.of_batch(head, frozen, ids, true, None, weights, read=true.detach())

    weights = torch.zeros(2, 12)
    weights[0, 4], weights[1, 9] = 1.0, 3.0
    of(weights).backward()
    assert true.grad is not None
    pulls = true.grad.abs().sum(-1)
    assert torch.equal(pulls > 0, weights > 0)
    assert 1.5 < pulls[1, 9] / pulls[0, 4] < 6.0
    torch.testing.assert_close(of(torch.ones(2, 12)), of(None))


def test_a_place_weighs_less_than_the_place_before_it(target: Path) -> None:
    frozen = FrozenTarget.load(str(target), "cpu")
    torch.manual_seed(2)
    head = untrained.medusa(frozen, 3)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(300, (2, 12))
    features = frozen.features(ids)
    roots = torch.arange(8)
    with torch.no_grad():
        loss = HeadLoss("cross-entropy", 3, 0.0, 1.0, noise=0.0).of_batch(head, frozen, ids, features, None)
        drafts = unrolled.unrolled(head, ids, features, 3, roots)
        apart = [
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, roots + step + 1].flatten())
            for step, (logits, _) in enumerate(drafts, start=1)
        ]
    expected = (apart[0] + 0.8 * apart[1] + 0.64 * apart[2]) / (1 + 0.8 + 0.64)
    torch.testing.assert_close(loss, expected, atol=0.02, rtol=0.01)  # the loss is computed in bfloat16


def test_the_command_shows_a_bar_for_each_stage_and_says_what_the_head_brings(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXTS))
    done = ended(
        *(capsys, "distil", text, "--kind", "medusa", "--target", target, "--out", tmp_path / "head"),
        *("--tokens", 512, "--window", 32, "--batch", 128, "--steps", 2, "--depth", 2),
        *("--threads", torch.get_num_threads(), "--json"),
    )
    assert (done.status, done.said["steps"], done.said["kind"]) == (0, 2, "medusa")
    assert set(done.said["acceptance"]["sampled"]) == {"before", "after"}
    for stage in ("target's text", "features", "held-out text", "training"):
        assert stage in done.err


def test_held_out_text_is_what_the_target_chooses_with_the_noise_of_a_session(
    target: Path, tmp_path: Path
) -> None:
    frozen = FrozenTarget.load(str(target), "cpu")
    texts = acceptance.held_out_texts(
        frozen, [[1, 2, 3], [5, 6, 7, 8]], 16, tmp_path / "held.npz", lambda *_: None
    )
    for text in texts:
        ids = torch.tensor(text.ids.astype("int64"))[None]
        rows = frozen.parts.lm_head(frozen.features(ids))[0, text.prompt_length - 1 : -1]
        places = range(text.prompt_length, len(text.ids))
        assert acceptance._chosen(rows, text, places).tolist() == ids[0, text.prompt_length :].tolist()
    again = acceptance.held_out_texts(frozen, [], 16, tmp_path / "held.npz", lambda *_: None)
    assert [text.ids.tolist() for text in again] == [text.ids.tolist() for text in texts]


def test_every_row_is_read_once_in_an_epoch() -> None:
    ids = np.arange(40, dtype=np.uint32).reshape(10, 4)
    features = [np.zeros((10, 4, 2), dtype=np.float16)]
    lessons = Lessons(ids, features, batch=5, seed=0)
    read = torch.cat([lessons.at(step)[0] for step in range(lessons.steps_per_epoch)])
    assert sorted(read.flatten().tolist()) == list(range(40))
