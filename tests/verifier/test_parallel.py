"""A verifier of two processes: the same ids as one process gives, and one death for all."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_source import FakeSource, Garbage, Oracle, running
from harness import Answer, Client, serving
from head_folders import HEADS, write_heads

from outrider.lm.runner import PackedLM
from outrider.v1 import explain_pb2, verifier_pb2
from outrider.v1.verifier_pb2_grpc import VerifierStub
from outrider.wire.channel import open_channel
from speculative.params import SamplingParams
from tests.in_time import PATIENCE_MS
from tests.lm.compiled_heads import kernel_folder
from tests.ranks import children_of, is_running, kill_if_there, ranks, spawn
from verifier_service.loading import load_target
from verifier_service.settings import VerifierSettings

pytestmark = pytest.mark.slow

ENDLESS = ((1, -100.0),)
GREEDY = SamplingParams(temperature=0.0, logit_bias=ENDLESS)
SAMPLED = SamplingParams(temperature=0.8, top_k=30, top_p=0.95, repetition_penalty=1.1, logit_bias=ENDLESS)
NEW = 60
PROMPTS = [(5, 17, 40), (60, 2, 33, 33, 33, 9, 80), tuple(range(2, 90)), (11,)]
TIMEOUT_S = 8.0
# 1 MiB per rank is 512 tokens of this model; 2 MiB are 464 beside what all heads keep.
FLAGS = ["--threads", "1", "--passes", "eager", "--kv-mb", "1", "--ranks-timeout-s", str(TIMEOUT_S)]
# Drafts are to be verified whatever a step costs on a loaded machine.
FLAGS += ["--budget", "fixed"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose keys and values are large, so that little memory is scarce."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    path = tmp_path_factory.mktemp("models") / "wide"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).float().eval().save_pretrained(path)
    return path


@dataclass
class Group:
    """The processes of one verifier."""

    head: subprocess.Popen[bytes]
    """What was started: torchrun, or the first rank."""
    pids: list[int]
    """Of the ranks, in order."""
    address: str
    metrics: str
    logs: list[Path]

    def log(self) -> str:
        return "\n".join(path.read_text() for path in self.logs)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=100) as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith(f"outrider_{name}{{"))

    def ends_within(self, seconds: float) -> bool:
        return until(lambda: not any(map(is_running, self.pids)), seconds)


def until(happened: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def ready(head: subprocess.Popen[bytes], logs: list[Path]) -> dict[str, Any]:
    assert head.stdout is not None
    for line in head.stdout:
        said: dict[str, Any] = json.loads(line)
        assert "error" not in said, said
        if "loaded" not in said:
            return said
    raise AssertionError([path.read_text() for path in logs])


@contextmanager
def under_torchrun(model: Path, log: Path, *more: str) -> Iterator[Group]:
    """As the documentation says; torchrun puts its ranks into sessions of their own."""
    head = spawn([*TORCHRUN, "-m", "verifier_service", "--model", str(model), *FLAGS, *more], log, {})
    pids: list[int] = []
    try:
        said = ready(head, [log])
        pids = children_of(head.pid)
        pids.sort(key=lambda pid: pid != said["pid"])
        yield Group(head, pids, said["address"], said["metrics"], [log])
    finally:
        pids = pids or children_of(head.pid)
        head.terminate()
        until(lambda: head.poll() is not None, 10)
        head.kill()
        head.communicate()
        for pid in pids:
            kill_if_there(pid)


@contextmanager
def with_children(model: Path, log: Path, *more: str) -> Iterator[Group]:
    """Without torchrun: the first rank starts the other."""
    head = spawn(["-m", "verifier_service", "--model", str(model), *FLAGS, "--ranks", "2", *more], log, {})
    pids = []
    try:
        said = ready(head, [log])
        pids = [head.pid, *children_of(head.pid)]
        yield Group(head, pids, said["address"], said["metrics"], [log])
    finally:
        head.kill()
        head.communicate()
        for pid in pids:
            kill_if_there(pid)


@contextmanager
def by_hand(model: Path, log: Path) -> Iterator[Group]:
    """Without torchrun, so that nobody but the ranks themselves can end them."""
    command = ["-m", "verifier_service", "--parent-pid", str(os.getpid()), "--model", str(model), *FLAGS]
    with ranks(command, log) as pair:
        logs = [log.with_suffix(f".{rank}") for rank in range(2)]
        said = ready(pair[0], logs)
        yield Group(pair[0], [process.pid for process in pair], said["address"], said["metrics"], logs)


@pytest.fixture(scope="module")
def heads(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The setting `heads`."""
    from transformers import AutoModelForCausalLM

    return write_heads(AutoModelForCausalLM.from_pretrained(folder), tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def group(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    log = tmp_path_factory.mktemp("group") / "log"
    with under_torchrun(folder, log, "--proposers", "bigram,recycling") as started:
        yield started


@asynccontextmanager
async def client_of(group: Group) -> AsyncIterator[Client]:
    async with open_channel(group.address, patience_ms=PATIENCE_MS) as channel:
        yield Client(VerifierStub(channel), "wide")


async def answers(
    verifier: Client, prompts: Sequence[tuple[int, ...]], params: SamplingParams, **asked: Any
) -> list[Answer]:
    """All at once."""
    asked = {"new": NEW, **asked}
    return await asyncio.gather(*(verifier.generate(prompt, params=params, **asked) for prompt in prompts))


async def one_process(
    folder: Path, prompts: Sequence[tuple[int, ...]], params: SamplingParams
) -> list[list[int]]:
    async with serving(PackedLM.load(folder, kv_mb=64)) as verifier:
        return [(await verifier.generate(prompt, params=params, new=NEW)).ids for prompt in prompts]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_two_processes_give_the_ids_of_one(group: Group, folder: Path, params: SamplingParams) -> None:
    expected = await one_process(folder, PROMPTS, params)
    oracle = Oracle(dict(zip(PROMPTS, expected, strict=True)))
    async with client_of(group) as verifier:
        plain = await answers(verifier, PROMPTS, params)
        assert [answer.ids for answer in plain] == expected
        for behaviour in (oracle, Garbage()):
            async with running(FakeSource(behaviour)) as source:
                sources = [("drafter", source.address), ("lookup", "")]
                count = 0
                # So small a target may be done before a busy machine has dialled the source.
                for _ in range(100):
                    drafted = await answers(verifier, PROMPTS, params, sources=sources)
                    assert [answer.ids for answer in drafted] == expected
                    count += sum(answer.usage.drafted_by_source["drafter"] for answer in drafted)
                    if count:
                        break
            assert count > 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_two_processes_with_batched_proposers_give_the_ids_of_one(
    group: Group, folder: Path, params: SamplingParams
) -> None:
    expected = await one_process(folder, PROMPTS, params)
    async with client_of(group) as verifier:
        for name in ("bigram", "recycling"):
            drafted = await answers(verifier, PROMPTS, params, sources=[(name, "")])
            assert [answer.ids for answer in drafted] == expected
            assert sum(answer.usage.drafted_by_source[name] for answer in drafted) > 0
    assert group.metric("verifier_proposers_muted") == 0


async def test_sessions_that_give_way_and_prefixes_found_again_are_the_same(
    group: Group, folder: Path
) -> None:
    prompts = [(number, *range(2, 50)) for number in range(7)]
    prompts += [(*prompts[0][:40], 3, 4, 5)]
    expected = await one_process(folder, prompts, SAMPLED)
    before = group.metric("num_preemptions_total")
    async with client_of(group) as verifier:
        for _ in range(2):
            found = await answers(verifier, prompts, SAMPLED, sources=[("lookup", "")])
            assert [answer.message for answer in found] == [""] * len(prompts)
            assert [answer.ids for answer in found] == expected
    assert group.metric("num_preemptions_total") > before


async def first_draft(verifier: Client, name: str, params: SamplingParams) -> set[tuple[int, ...]]:
    """Paths of a head's first draft, two levels deep: further down rounding decides which nodes stay."""
    request = verifier.request(PROMPTS[1], params=params, new=3, sources=[(name, "")])
    await verifier.open(request)
    await verifier.read(request)
    asked = explain_pb2.ExplainRequest(key=request.key, nodes=True)
    explained = await verifier.stub.Explain(asked, timeout=100)
    nodes = next(each.nodes for each in explained.incarnations[0].rounds if each.nodes)
    paths: list[tuple[int, ...]] = [()]
    for node in nodes:
        paths.append((*paths[node.parent], node.id))
    return {path for path in paths if 0 < len(path) <= 2}


async def test_heads_beside_two_processes_draft_what_they_draft_beside_one(
    folder: Path, heads: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"model": str(folder), "heads": heads}
    asked = [(name, params) for params in (GREEDY, SAMPLED) for name in HEADS]
    async with serving(load_target(VerifierSettings(**settings)), budget="fixed", **settings) as alone:
        expected = [await first_draft(alone, *each) for each in asked]
    with with_children(folder, tmp_path / "log", "--heads", heads, "--kv-mb", "2") as group:
        async with client_of(group) as verifier:
            assert [await first_draft(verifier, *each) for each in asked] == expected
    assert len(set(map(frozenset, expected[: len(HEADS)]))) == len(HEADS), "each has drafts of its own"


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_two_processes_with_heads_give_the_ids_of_one(
    folder: Path, heads: str, params: SamplingParams, tmp_path: Path
) -> None:
    many = [(number, *range(2, 50)) for number in range(5)]
    many += [(*many[0][:40], 3, 4, 5)]
    sources = [(name, "") for name in HEADS]
    expected = await one_process(folder, [*PROMPTS, *many], params)
    with with_children(folder, tmp_path / "log", "--heads", heads, "--kv-mb", "2") as group:
        async with client_of(group) as verifier:
            drafted = await answers(verifier, PROMPTS, params, sources=sources)
            by_source = Counter[str]()
            for answer in drafted:
                by_source += Counter(answer.usage.drafted_by_source)
            assert by_source.keys() == set(HEADS)
            for _ in range(2):
                drafted += await answers(verifier, many, params, sources=sources)
        assert [answer.ids for answer in drafted] == [*expected, *expected[len(PROMPTS) :]]
        assert group.metric("num_preemptions_total") > 0
        assert group.metric("verifier_proposers_muted") == 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_compiled_heads_beside_two_processes_give_the_ids_of_one(
    folder: Path, heads: str, params: SamplingParams, tmp_path: Path
) -> None:
    """The kernel takes the layers that rank 0 gathered; the target's own passes stay eager."""
    names = ("eagle", "eagle3", "mtp")
    pairs = ",".join(head for head in heads.split(",") if head.partition("=")[0] in names)
    flags = ["--heads", pairs, "--kv-mb", "2", "--passes", "auto", "--cache-dir", str(kernel_folder())]
    expected = await one_process(folder, PROMPTS, params)
    with with_children(folder, tmp_path / "log", *flags) as group:
        maps = Path(f"/proc/{group.head.pid}/maps")
        assert until(lambda: str(kernel_folder()) in maps.read_text(), 200), "the first rank has the kernel"
        async with client_of(group) as verifier:
            first, again = [
                await answers(verifier, PROMPTS, params, sources=[(name, "") for name in names])
                for _ in range(2)
            ]
        assert [answer.ids for answer in first + again] == 2 * expected
        drafted = {name for answer in first for name in answer.usage.drafted_by_source}
        assert drafted == set(names)
        assert group.metric("prefix_cache_hits_total") > 0
        assert group.metric("verifier_proposers_muted") == 0
        assert "the head stays eager" not in group.log()


async def test_how_it_is_split_is_part_of_its_numerics(group: Group) -> None:
    async with client_of(group) as verifier:
        said = await verifier.stub.Describe(verifier_pb2.VerifierDescribeRequest())
    assert said.numerics == "cpu float32 2 ranks"


async def test_an_idle_verifier_outlives_the_timeout_of_its_ranks(group: Group) -> None:
    await asyncio.sleep(1.5 * TIMEOUT_S)
    async with client_of(group) as verifier:
        assert len((await verifier.generate(PROMPTS[0], new=8, params=GREEDY)).ids) == 8
    assert all(map(is_running, group.pids))


async def half_a_request(group: Group) -> None:
    """A request that is still running when this returns."""
    async with client_of(group) as verifier:
        await verifier.open(verifier.request(PROMPTS[0], new=240, params=GREEDY))


def test_sigterm_lets_all_end_in_order(folder: Path, tmp_path: Path) -> None:
    with under_torchrun(folder, tmp_path / "log") as group:
        asyncio.run(half_a_request(group))
        group.head.terminate()
        assert group.ends_within(60), group.log()
        assert "ends with rank 0" in group.log()
        assert "gave up" not in group.log()


def test_the_death_of_a_rank_is_the_death_of_the_verifier(folder: Path, tmp_path: Path) -> None:
    with under_torchrun(folder, tmp_path / "log") as group:
        asyncio.run(half_a_request(group))
        os.kill(group.pids[1], signal.SIGKILL)
        assert group.head.wait(100) != 0
        assert group.ends_within(60)
        assert "verifier gave up: " in group.log()
        assert "lost, and all end with it" in group.log()


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_a_rank_that_hangs_ends_the_verifier_within_the_timeout(
    folder: Path, tmp_path: Path, busy: bool
) -> None:
    with with_children(folder, tmp_path / "log") as group:
        os.kill(group.pids[1], signal.SIGSTOP)
        if busy:
            asyncio.run(half_a_request(group))
        assert group.head.wait(TIMEOUT_S + 60) == 1
        assert re.search("gave up: .*rank.* of 2 is lost, .*Timed out", group.log()), group.log()
        assert group.ends_within(60), "not even the one that hangs is left"


def test_a_child_that_dies_is_named_and_ends_the_verifier(folder: Path, tmp_path: Path) -> None:
    with with_children(folder, tmp_path / "log") as group:
        os.kill(group.pids[1], signal.SIGKILL)
        assert group.head.wait(100) == 1
        assert "gave up: rank 1 of 2 is lost, and all end with it" in group.log()
        assert group.ends_within(60)


def test_sigterm_to_the_first_rank_is_a_success(folder: Path, tmp_path: Path) -> None:
    with with_children(folder, tmp_path / "log") as group:
        group.head.terminate()
        assert group.head.wait(100) == 0
        assert group.ends_within(60)


def test_without_the_first_rank_no_other_goes_on(folder: Path, tmp_path: Path) -> None:
    with by_hand(folder, tmp_path / "log") as group:
        os.kill(group.pids[0], signal.SIGKILL)
        assert group.ends_within(60)
        assert "rank 0 of 2 is lost" in group.log()


def refusal(model: Path, log: Path, *more: str) -> dict[str, Any]:
    """What a verifier under torchrun says that does not come up."""
    head = spawn([*TORCHRUN, "-m", "verifier_service", "--model", str(model), *FLAGS, *more], log, {})
    try:
        said, _ = head.communicate(timeout=250)
    finally:
        head.kill()
    assert head.returncode != 0
    found: dict[str, Any] = json.loads(said)
    return found["error"]


def test_what_cannot_be_split_is_refused_by_name(tmp_path: Path, tiny_llama: Path) -> None:
    config = json.loads((tiny_llama / "config.json").read_text())
    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 1}))
    assert refusal(tmp_path, tmp_path / "log") == {
        "code": "FAILED_PRECONDITION",
        "message": "llama is not served by 2 ranks: its num_key_value_heads = 1 do not divide by 2",
    }


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--heads", "{head}"), "beside ranks = 2: the target itself reads its look-ahead tokens"),
        (("--weight-dtype", "int8"), "weight_dtype = int8 beside ranks = 2: such weights are multiplied"),
    ],
    ids=["heads", "weight_dtype"],
)
def test_what_one_rank_alone_serves_is_refused_under_torchrun_too(
    folder: Path, tmp_path: Path, flags: tuple[str, ...], why: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"look_ahead_tokens": 1, "hidden_size": 32}))
    found = refusal(folder, tmp_path / "log", *(flag.format(head=tmp_path) for flag in flags))
    assert found["code"] == "INVALID_ARGUMENT"
    assert why in found["message"]
