"""Generation with passages that are looked up again and again, through real services."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from outrider.client import Client
from outrider.rag import DenseRetriever, Rag, RagLimits, RagPassage, SparseRetriever, hashed_words
from outrider.rag.passages import Retriever
from speculative.errors import InvalidRequest, OutriderError, Unavailable
from speculative.stop import FinishReason
from tests.conftest import LINES

PASSAGES = [RagPassage(f"line {number}", line) for number, line in enumerate(LINES)]
PROMPT = "for index, value in enumerate(values):\n"


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))


@pytest.mark.parametrize("guesses", [1, 3, "adaptive"])
@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_guessing_passages_changes_no_id(
    client: Client, tokenizer: Tokenizer, guesses: Any, kind: str, temperature: float
) -> None:
    pytest.importorskip("faiss")
    retriever: Retriever = (
        SparseRetriever(PASSAGES) if kind == "sparse" else DenseRetriever(PASSAGES, hashed_words(32))
    )
    limits = RagLimits(every=4, query_tokens=12, passage_tokens=40, guesses=guesses, prefetch=2)
    rag = Rag(client, retriever, tokenizer, limits)
    request: dict[str, Any] = {"max_tokens": 26, "temperature": temperature, "seed": 5, "ignore_eos": True}

    answer = rag.generate(PROMPT, **request)
    plain = rag.generate(PROMPT, **request, speculative=False)

    assert (answer.ids, answer.text, answer.passages) == (plain.ids, plain.text, plain.passages)
    assert len(answer.ids) == 26
    assert answer.finish_reason is FinishReason.LENGTH
    assert (plain.counts.searches, plain.counts.guesses, len(plain.passages)) == (7, 0, 7)
    assert answer.counts.guesses > 0


def test_each_piece_is_what_one_request_under_its_passage_gives(client: Client, tokenizer: Tokenizer) -> None:
    limits = RagLimits(every=4, query_tokens=12, passage_tokens=40)
    rag = Rag(client, SparseRetriever(PASSAGES), tokenizer, limits)
    answer = rag.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True)

    text: list[int] = []
    for passage in answer.passages:
        assert passage is not None
        before = tokenizer.encode(f"{passage.text}\n").ids[:40]
        ids = [*before, *tokenizer.encode(PROMPT).ids, *text]
        text += client.generate(ids=ids, max_tokens=4, temperature=0, ignore_eos=True).ids
    assert tuple(text) == answer.ids


def test_pieces_of_one_answer_have_noise_of_their_own(client: Client, tokenizer: Tokenizer) -> None:
    """Pieces under passages of other lengths meet the same positions; the same noise would tie them."""
    flat = {"temperature": 100.0, "seed": 5, "ignore_eos": True}  # so that noise alone chooses

    class Shrinking:
        lengths = iter((20, 16, 12, 8))

        def search(self, queries: Any, count: int) -> list[list[RagPassage]]:
            length = next(self.lengths)
            return [[RagPassage(str(length), "e" * 200)] for _ in queries]

        def scores(self, query: str, passages: Any) -> list[float]:
            return [0.0] * len(passages)

    rag = Rag(
        client,
        Shrinking(),
        tokenizer,
        RagLimits(every=4, passage_tokens=40),
        template=lambda passage: "\n" * int(passage.name),
    )
    ids = rag.generate(PROMPT, max_tokens=16, **flat, speculative=False).ids  # type: ignore[arg-type]
    assert len({ids[start : start + 4] for start in range(0, 16, 4)}) == 4


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"prompt": ""}, "prompt is ''"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"timeout": 0}, "timeout is 0"),
        ({"stop": ["x"]}, "stop cannot be used here"),
        ({"temperature": -1}, "temperature"),
    ],
    ids=str,
)
def test_bad_requests_are_refused_by_name(
    client: Client, tokenizer: Tokenizer, asked: dict[str, Any], said: str
) -> None:
    rag = Rag(client, SparseRetriever(PASSAGES), tokenizer)
    with pytest.raises(InvalidRequest, match=said):
        rag.generate(**{"prompt": PROMPT, **asked})


def test_a_retriever_that_answers_too_few_queries_is_an_error(client: Client, tokenizer: Tokenizer) -> None:
    class Silent(SparseRetriever):
        def search(self, queries: Any, count: int) -> list[list[RagPassage]]:
            return []

    with pytest.raises(OutriderError, match="0 lists for 1 queries"):
        Rag(client, Silent(PASSAGES), tokenizer).generate(PROMPT, max_tokens=4)


def test_a_timeout_ends_the_whole_answer(client: Client, tokenizer: Tokenizer) -> None:
    with pytest.raises(Unavailable):
        Rag(client, SparseRetriever(PASSAGES), tokenizer).generate(PROMPT, max_tokens=200, timeout=1e-6)
