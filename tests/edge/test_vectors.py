"""The published vectors are what this code computes, and hold all that a second implementation needs."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from outrider.edge.top_k import TopK, TopKDigest
from outrider.v1 import common_pb2, generation_pb2
from outrider.wire.codec import sampling_from_wire
from speculative.hashing import prefix_hash
from speculative.ranking import ChildRanker
from tests.edge import second_device
from tests.edge.make_vectors import FOLDER, VECTORS, text_of


@pytest.mark.parametrize("name", VECTORS)
def test_the_files_are_what_the_command_writes(name: str) -> None:
    written = (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    assert written == text_of(name), (
        "run python -m tests.edge.make_vectors, and say in docs/edge.md what changed"
    )


def read(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def test_messages_are_as_small_as_the_page_says() -> None:
    messages = read("messages")
    window, commit = messages["requests"][0], messages["responses"][0]
    drafts = generation_pb2.GenerateRequest.FromString(bytes.fromhex(window["bytes"])).drafts
    tokens = generation_pb2.GenerateResponse.FromString(bytes.fromhex(commit["bytes"])).tokens
    assert len(drafts.ids) == 8
    assert drafts.ByteSize() <= 60
    assert len(tokens.ids) == 4
    assert tokens.ByteSize() <= 40


@pytest.mark.parametrize("name", ["greedy", "sampled", "penalized"])
def test_each_drafted_id_follows_from_the_file_alone(name: str) -> None:
    session = read("sessions")[name]
    model = {tuple(entry["ids"]): entry for entry in session["model"]}
    sampling = common_pb2.Sampling.FromString(bytes.fromhex(session["sampling_bytes"]))
    width = session["vocabulary_size"]
    params = sampling_from_wire(sampling, width)
    prefixes = {prefix_hash(ids): ids for ids in model}
    committed = tuple(session["prompt_ids"])
    checked = 0
    for step in session["steps"]:
        if "tokens" in step:
            committed = (*committed, *step["tokens"]["ids"])
            assert int(step["tokens"]["prefix_hash"], 16) == prefix_hash(committed)
            continue
        drafts = step["drafts"]
        ids = prefixes[int(drafts["prefix_hash"], 16)]
        assert len(ids) == drafts["base"]
        for id_ in drafts["ids"]:
            answer = model[ids]
            top = TopK.of(list(zip(answer["top_ids"], answer["top_logprobs"], strict=True)))
            ranker = ChildRanker(
                params,
                int(session["seed"], 16),
                committed,
                len(session["prompt_ids"]),
                width=width,
                bound=width,
                children=1,
                scale=0.65,
            )
            best, _ = ranker.children(TopKDigest(top, width), len(ids), ids[len(committed) :])[0]
            assert best == id_
            ids = (*ids, id_)
            checked += 1
    assert checked > 20


def test_a_device_written_from_the_page_alone_computes_what_the_files_say() -> None:
    for entry in read("noise")["noise"]:
        place = int(entry["seed"], 16), entry["position"], entry["id"]
        assert second_device.lead(*place) == entry["lead"]
        assert second_device.uniform(*place) == entry["uniform"]
        assert second_device.noise(*place) == pytest.approx(entry["noise"], rel=1e-14)
    for entry in read("prefix-hashes")["prefix_hashes"]:
        assert second_device.prefix_hash(entry["ids"]) == int(entry["hash"], 16)
    for entry in read("vocabularies")["vocabularies"]:
        assert second_device.vocabulary_digest(entry["tokens"]) == entry["digest"]


@pytest.mark.parametrize("name", ["greedy", "sampled", "penalized"])
def test_a_device_written_from_the_page_alone_sends_the_same_windows(name: str) -> None:
    session = read("sessions")[name]
    device, sent = second_device.SecondDevice(session), 0
    windows = list(device.windows())
    for step in session["steps"]:
        if tokens := step.get("tokens"):
            assert not windows, "the file has fewer windows than the device sends"
            device.receive(tokens["ids"], int(tokens["epoch"], 16))
            windows = list(device.windows())
            continue
        drafts, window, sent = step["drafts"], windows.pop(0), sent + 1
        assert (window["base"], window["ids"]) == (drafts["base"], drafts["ids"])
        assert (window["prefix_hash"], window["epoch"]) == (
            int(drafts["prefix_hash"], 16),
            int(drafts["epoch"], 16),
        )
    assert sent > 6
    assert not windows


def test_javascript_computes_the_same_noise_hashes_and_digests() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no Node.js here")
    script = Path(__file__).with_name("vectors.mjs")
    done = subprocess.run([node, script, FOLDER], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "71 of 71 equal" in done.stdout
