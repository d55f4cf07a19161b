"""Writes the test vectors of docs/edge: `python -m tests.edge.make_vectors`.

Integers of 64 bits are hexadecimal strings, as JSON's numbers have 53 bits in many languages. Noise and
log-probabilities are decimal with all digits of a float64.
"""

import base64
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType
from google.protobuf.json_format import MessageToDict

from outrider.edge.backends.gguf_vocabulary import read_vocabulary, vocabulary_digest
from outrider.edge.controller import Decision
from outrider.edge.device_session import LEAST_SURVIVAL, DeviceSession, Terms
from outrider.edge.latency_model import Mode
from outrider.edge.top_k import TopK
from outrider.edge.wire import drafts_to_wire
from outrider.v1 import generation_pb2
from outrider.wire.codec import sampling_to_wire
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash
from speculative.noise import gumbel, leads, uniform
from speculative.params import SamplingParams

FOLDER = Path(__file__).parents[2] / "docs" / "edge"
WIDTH = 64
NODES = 8
"""Ids of a recorded model's answer."""
DECISION = Decision(Mode.PIPELINED, 4, 2, 0, "the vectors' own")


def hex64(number: int) -> str:
    return f"0x{number:016x}"


def noise_vectors() -> dict[str, Any]:
    places = [(0, 0, 6), (42, 1000, 18), (2**64 - 1, 2**31, 5), (7, 3, 70)]
    listed = []
    for seed, position, width in places:
        lead, share, noise = (draw(seed, position, width) for draw in (leads, uniform, gumbel))
        for id_ in sorted({0, 1, 3, 4, width - 2, width - 1}):
            listed.append(
                {
                    "seed": hex64(seed),
                    "position": position,
                    "id": id_,
                    "lead": int(lead[id_]),
                    "uniform": float(share[id_]),
                    "noise": float(noise[id_]),
                }
            )
    return {"generator": "Philox4x64-10", "noise": listed}


def hash_vectors() -> dict[str, Any]:
    cases: list[list[int]] = [[], [0], [1], [0, 1], [1, 0], [2**32 - 1], list(range(300))]
    return {"prefix_hashes": [{"ids": ids, "hash": hex64(prefix_hash(ids))} for ids in cases]}


def vocabulary_vectors() -> dict[str, Any]:
    """A vocabulary by its tokens, and the same as a GGUF file that pads it."""
    tokens = ["<eos>", "a", "Ġb", "ü", "\n", "日本"]
    digest = vocabulary_digest(tokens, [])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        writer = GGUFWriter(path, "llama")
        writer.add_token_list([*tokens, "<unused0>", "<unused1>"])
        writer.add_token_types([TokenType.CONTROL] + [TokenType.NORMAL] * 5 + [TokenType.UNUSED] * 2)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        assert vocabulary_digest(*read_vocabulary(path)) == digest
        data = path.read_bytes()
    gguf = base64.b64encode(data).decode()
    return {"vocabularies": [{"tokens": tokens, "digest": digest, "gguf_base64": gguf}]}


def message_vectors() -> dict[str, Any]:
    """Messages as fields and as bytes."""
    chain = Fragment(1, 0, 1000, 0xFEDCBA9876543210, (120_000,) * 8, tuple(range(-1, 7)), (0.9,) * 8)
    tree = Fragment(1, 0, 3, prefix_hash([1, 2, 3]), (7, 8, 9), (-1, -1, 0), (0.6, 0.3, 0.5))
    cases = [
        ("a window of eight tokens", drafts_to_wire(chain)),
        ("a window that tells a new epoch", drafts_to_wire(chain, epoch=2**40 + 5)),
        ("a tree", drafts_to_wire(tree)),
        ("rounds may wait for 120 ms", drafts_to_wire(None, wait_ms=120)),
    ]
    commit = generation_pb2.GeneratedTokens(position=1000, ids=[120_000] * 4, prefix_hash=chain.prefix_hash)
    answer = generation_pb2.GenerateResponse(tokens=commit)
    return {
        "requests": [
            {
                "what": what,
                "fields": window_fields(message.drafts),
                "bytes": message.SerializeToString().hex(),
            }
            for what, message in cases
        ],
        "responses": [
            {
                "what": "four tokens",
                "fields": commit_fields(commit),
                "bytes": answer.SerializeToString().hex(),
            }
        ],
    }


def window_fields(drafts: generation_pb2.DeviceDrafts) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "base": drafts.base,
        "prefix_hash": hex64(drafts.prefix_hash),
        "ids": list(drafts.ids),
        "parents": list(drafts.parents),
        "survival": list(drafts.survival),
        "epoch": hex64(drafts.epoch),
    }
    return fields | ({"wait_ms": drafts.wait_ms} if drafts.HasField("wait_ms") else {})


def commit_fields(tokens: generation_pb2.GeneratedTokens) -> dict[str, Any]:
    return {
        "position": tokens.position,
        "ids": list(tokens.ids),
        "prefix_hash": hex64(tokens.prefix_hash),
        "epoch": hex64(tokens.epoch),
    }


def answer_of(ids: Sequence[int]) -> TopK:
    """What the recorded model answers: arbitrary log-probabilities, but always the same."""
    draw = np.random.Generator(np.random.Philox(key=[prefix_hash(ids), 1]))
    logits = draw.normal(0.0, 3.0, WIDTH)
    logprobs = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-logprobs)[:NODES]
    return TopK.of([(int(id_), round(float(logprobs[id_]), 4)) for id_ in best])


class Recording:
    """Plays and writes down a session of a device with a target that follows the drafts now and then."""

    def __init__(self, params: SamplingParams, seed: int) -> None:
        prompt = (3, 1, 4, 1, 5)
        end_ids = frozenset({0})
        self._terms = Terms(prompt, len(prompt), seed, 17, params, WIDTH, 200, 256, 16, end_ids, 32)
        self._session = DeviceSession(self._terms, DECISION)
        self._ids = list(prompt)
        self._model: dict[tuple[int, ...], TopK] = {}
        self._steps: list[dict[str, Any]] = []
        self._told = 0

    def played(self) -> dict[str, Any]:
        """The session with four commits, of which two refute drafts, and one comes from another verifier."""
        windows = self._draft()
        self._commit([*windows[0].tokens[:2]])
        windows = self._draft()
        self._commit([(self._next_drafted() + 1) % WIDTH])
        windows = self._draft()
        self._commit([*windows[0].tokens, 9])
        self._draft()
        self._commit([self._next_drafted()], epoch=18)
        self._draft()
        terms = self._terms
        return {
            "prompt_ids": terms.ids,
            "seed": hex64(terms.seed),
            "epoch": hex64(terms.epoch),
            "vocabulary_size": WIDTH,
            "end_ids": sorted(terms.end_ids),
            "limit": terms.limit,
            "credits": terms.credits,
            "credits_per_token": terms.credits_per_token,
            "least_survival": LEAST_SURVIVAL,
            "sampling_bytes": sampling_to_wire(terms.params).SerializeToString().hex(),
            "sampling": MessageToDict(sampling_to_wire(terms.params), preserving_proto_field_name=True),
            "window": DECISION.window,
            "windows_in_flight": DECISION.in_flight,
            "model": [
                {
                    "ids": ids,
                    "top_ids": top.ids.tolist(),
                    "top_logprobs": [round(float(p), 4) for p in top.logprobs],
                }
                for ids, top in self._model.items()
            ],
            "steps": self._steps,
        }

    def _next_drafted(self) -> int:
        """The token that was drafted last for the next position."""
        at = len(self._ids)
        sent = [step["drafts"] for step in reversed(self._steps) if "drafts" in step]
        window = next(one for one in sent if one["base"] <= at < one["base"] + len(one["ids"]))
        token: int = window["ids"][at - window["base"]]
        return token

    def _draft(self) -> list[Fragment]:
        session, windows = self._session, []
        while True:
            while (window := session.take_window()) is not None:
                windows.append(window)
                told, self._told = self._told == window.epoch, window.epoch
                message = drafts_to_wire(window, epoch=0 if told else window.epoch)
                self._steps.append({"drafts": window_fields(message.drafts)})
            if (reading := session.plan()) is None:
                return windows
            whole = (*session.read[: reading.keep], *reading.ids)
            self._model[whole] = answer_of(whole)
            session.drafted(reading, self._model[whole])

    def _commit(self, ids: list[int], epoch: int = 0) -> None:
        position = len(self._ids)
        self._ids += ids
        tokens = generation_pb2.GeneratedTokens(
            position=position, ids=ids, prefix_hash=prefix_hash(self._ids), epoch=epoch
        )
        self._session.commit(position, ids, tokens.prefix_hash, epoch)
        self._steps.append({"tokens": commit_fields(tokens)})


def session_vectors() -> dict[str, Any]:
    """Sessions by name: what the server says, what the model answers, and the drafts that must follow."""
    return {
        name: Recording(params, seed).played()
        for name, params, seed in (
            ("greedy", SamplingParams(temperature=0.0), 1),
            ("sampled", SamplingParams(temperature=0.8, top_p=0.9), 2**63 + 11),
            ("penalized", SamplingParams(temperature=0.6, top_k=5, presence_penalty=1.5, min_tokens=3), 5),
        )
    }


VECTORS = {
    "noise": noise_vectors,
    "prefix-hashes": hash_vectors,
    "vocabularies": vocabulary_vectors,
    "messages": message_vectors,
    "sessions": session_vectors,
}


def text_of(name: str) -> str:
    """The file's text: a list of plain values has one line."""
    text = json.dumps(VECTORS[name](), indent=1, ensure_ascii=False)
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in VECTORS:
        (FOLDER / f"{name}.json").write_text(text_of(name), encoding="utf-8")


if __name__ == "__main__":
    main()
