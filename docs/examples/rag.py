"""Complete Python with a passage of the standard library before the prompt, found anew every eight tokens."""

import json
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from outrider import Client
from outrider.rag import Rag, RagLimits, RagPassage, SparseRetriever

TARGET = Path(__file__).parents[2] / "models" / "target"


@contextmanager
def services():
    """`outrider up` with the embedded pair; gives the address."""
    command = [sys.executable, "-m", "outrider.cli", "up", "--json", "--retrieval", "none"]
    command += ["--bind", "127.0.0.1:0", "--http-bind", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as up:
        try:
            yield json.loads(up.stdout.readline())["address"]
        finally:
            up.terminate()


def functions_of(library):
    """Passages: the pieces of some modules that begin with a def or a class."""
    for name in ("textwrap", "shutil", "queue", "heapq", "bisect", "fnmatch", "glob", "configparser"):
        pieces = Path(library, f"{name}.py").read_text().split("\ndef ")
        for number, piece in enumerate(pieces[1:]):
            yield RagPassage(f"{name}:{number}", f"def {piece}")


def ask(address, tokenizer):
    retriever = SparseRetriever(functions_of(sysconfig.get_path("stdlib")))
    with Client(address) as client:
        rag = Rag(client, retriever, tokenizer, RagLimits(passage_tokens=128, prefetch=4))
        request = {"max_tokens": 64, "temperature": 0, "timeout": 300}
        answer = rag.generate("def shorten(text, width):\n", **request)
        plain = rag.generate("def shorten(text, width):\n", **request, speculative=False)
    print(answer.text)
    print("passages:", *(passage.name if passage else "none" for passage in answer.passages))
    print(f"{answer.counts.searches} searches in place of {plain.counts.searches}")
    print("ids equal to those of the plain loop:", answer.ids == plain.ids)


if __name__ == "__main__":
    if sys.argv[1:]:  # host:port of running services, and the folder of their target
        ask(sys.argv[1], Tokenizer.from_file(f"{sys.argv[2]}/tokenizer.json"))
    else:
        with services() as address:
            ask(address, Tokenizer.from_file(str(TARGET / "tokenizer.json")))
