"""The published vectors are what this code computes, and hold all that a second implementation needs."""

import json
from typing import Any

import pytest

from outrider.edge.top_k import TopK, TopKDigest
from outrider.v1 import common_pb2, generation_pb2
from outrider.wire.codec import sampling_from_wire
from speculative.hashing import prefix_hash
from speculative.ranking import ChildRanker
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
