"""Retrieval-augmented generation: a passage before the prompt, looked up anew every few tokens.

    passages = [RagPassage(path.name, path.read_text()) for path in folder.glob("*.py")]
    with outrider.Client("127.0.0.1:50051") as client:
        rag = Rag(client, SparseRetriever(passages), tokenizer)
        print(rag.generate("def fibonacci(n):", max_tokens=96, temperature=0).text)

The method is RaLMSpec's (Zhang et al., 2024, arXiv 2401.14021). Passages found so far guess what the next
searches will find; one search verifies many guesses at once, and text behind a wrong guess is made again. The
ids are those of the loop that waits for each search. docs/rag.md says how to use the package.
"""

from outrider.rag.dense import DenseRetriever, hashed_words
from outrider.rag.generating import Rag, RagAnswer
from outrider.rag.loops import RagCounts, RagLimits
from outrider.rag.passages import RagPassage, Retriever
from outrider.rag.sparse import SparseRetriever

__all__ = [
    "DenseRetriever",
    "Rag",
    "RagAnswer",
    "RagCounts",
    "RagLimits",
    "RagPassage",
    "Retriever",
    "SparseRetriever",
    "hashed_words",
]
