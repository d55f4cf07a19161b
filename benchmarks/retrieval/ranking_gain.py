"""What ranking by the session's noise gains over ranking by counts alone, per round and without services.

The target's own continuations of held-out prompts are computed first, as drafts never change them. Then every
round looks the committed ids up in one memory, ranks the trie in both ways, and accepts the path of the best
nodes that the target took. The memories are the demonstration's corpus, and past outputs of the same prompts
under other seeds. Run `python -m benchmarks.retrieval.ranking_gain`. The last line is one JSON object.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.retrieval.teacher_forced import accepted
from benchmarks.shared.envelope import MODELS
from benchmarks.shared.heldout import HELD_OUT, held_out_records
from outrider.cli.local.demo_corpus import demo_corpus
from outrider.lm.runner import PackedLM
from outrider.pair.simulation import Truth, continuation
from outrider.tokens import TokenTable
from retrieval_service.corpus.index import CorpusIndex
from retrieval_service.joint_tree import FoundTrie, JointTree, Sampling, TreeBounds
from retrieval_service.past.outputs import PastOutputs
from retrieval_service.ranking import DraftShape
from retrieval_service.trie import CountedTrie, Memory
from retrieval_service.trust import TrustBook
from speculative.params import SamplingParams
from speculative.tree import ROOT, TokenTree

GREEDY = SamplingParams(temperature=0)
WINDOW = 64
"""Most last tokens that are looked up."""
FLOOR = 0.05
"""Survival below which a node is no part of a draft: nothing has been learnt that would make it true."""
FIRST_PAST_SEED = 1000
"""The first seed of past outputs, beyond all seeds that are measured."""


def ranked(
    trie: CountedTrie, params: SamplingParams, seed: int, position: int, shape: DraftShape
) -> TokenTree:
    """The likeliest nodes of a trie, for a memory that nothing has been learnt of."""
    drafted = JointTree(
        {1: FoundTrie("memory", trie)},
        TrustBook().session(""),
        None if params.greedy else Sampling(seed, position),
        shape,
        TreeBounds(shape.nodes, shape.depth, max(trie.tokens) + 1),
    ).nodes
    place = {node: index for index, node in enumerate(drafted)}
    return TokenTree(
        tuple(node.token for node in drafted),
        tuple(place.get(node.parent, ROOT) for node in drafted if node.parent is not None),
        tuple(node.survival for node in drafted),
        (1,) * len(drafted),
    )


def count_rounds(
    truth: Truth, memory: Memory, params: SamplingParams, shape: DraftShape, overstated: list[float]
) -> int:
    """Number of rounds of one request with drafts of this memory alone, ranked with these parameters.

    Appends to `overstated`, for every draft, the sum of its survivals less its accepted nodes.
    """
    position, count = truth.prompt_length, 0
    while position < len(truth.ids):
        ids = truth.ids[max(0, position - WINDOW) : position]
        trie = memory.lookup(ids, node_limit=3 * shape.nodes, depth=shape.depth)
        tree = None if trie is None else ranked(trie, params, truth.seed, position, shape)
        length = accepted(tree, truth.ids[position:])
        if tree is not None:
            overstated.append(sum(tree.survival) - length)
        position += length + 1
        count += 1
    return count


def measure(
    truths: list[Truth], memories: list[Memory], params: SamplingParams, shape: DraftShape
) -> dict[str, float]:
    """Acceptance length, and by how much a draft's summed survival exceeds its accepted nodes on average."""
    overstated: list[float] = []
    made = sum(len(truth.ids) - truth.prompt_length for truth in truths)
    count = sum(
        count_rounds(truth, memory, params, shape, overstated)
        for truth, memory in zip(truths, memories, strict=True)
    )
    return {
        "acceptance_length": round(made / count, 3),
        "overstated": round(sum(overstated) / max(1, len(overstated)), 3),
    }


def past_of(target: PackedLM, truth: Truth, tokens: int, outputs: int) -> Memory:
    """A memory of plainly decoded past outputs of the same prompt under other seeds."""
    past = PastOutputs(None)
    prompt = truth.ids[: truth.prompt_length]
    for seed in range(FIRST_PAST_SEED, FIRST_PAST_SEED + outputs):
        earlier = continuation(target, prompt, truth.params, seed, tokens)
        past.extend("tenant", str(seed), earlier.ids[earlier.prompt_length :])
        past.finish("tenant", str(seed))
    return past.memory("tenant")


def flags() -> argparse.Namespace:
    """Parses the flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the last line only")
    parser.add_argument("--target", type=Path, default=MODELS / "target", help="folder of the target model")
    parser.add_argument("--prompts", type=Path, default=HELD_OUT, help="JSON lines with a `prompt` each")
    parser.add_argument("--count", type=int, default=8, help="number of prompts used")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt")
    parser.add_argument("--outputs", type=int, default=4, help="past outputs per prompt")
    parser.add_argument("--temperature", type=float, default=0.8, help="of decoding and of the noise")
    parser.add_argument(
        "--nodes", type=int, nargs="+", default=[8, 16, 32], help="nodes per draft, one or more"
    )
    return parser.parse_args()


def main() -> None:
    """Compares the two ways to rank and prints the result."""
    args, started = flags(), time.perf_counter()
    target = PackedLM.load(args.target, check=False)
    tokens = TokenTable.from_json(target.tokenizer_json or "")
    corpus = CorpusIndex.open(demo_corpus(tokens, args.prompts), tokens.digest)
    params = SamplingParams(temperature=args.temperature)
    prompts = [record["prompt"] for record in held_out_records(args.count, args.prompts)]
    truths = [
        continuation(target, tokens.encode(prompt), params, seed, args.tokens)
        for seed, prompt in enumerate(prompts)
    ]
    memories: dict[str, list[Memory]] = {
        "corpus": [corpus] * len(truths),
        "past": [past_of(target, truth, args.tokens, args.outputs) for truth in truths],
    }
    found: dict[str, Any] = {}
    for name, memory in memories.items():
        for nodes in args.nodes:
            shape = DraftShape(nodes=nodes, floor=FLOOR)
            ways = {"counts": GREEDY, "noise": params}
            row = {way: measure(truths, memory, ranked_by, shape) for way, ranked_by in ways.items()}
            found[f"{name}_{nodes}"] = row
            if not args.json:
                print(f"{name}, {nodes} nodes: {row}", flush=True)
    settings = {
        "temperature": args.temperature,
        "count": args.count,
        "tokens": args.tokens,
        "outputs": args.outputs,
    }
    seconds = round(time.perf_counter() - started, 1)
    print(json.dumps({"settings": settings, "seconds": seconds} | {"by_memory": found}, default=str))


if __name__ == "__main__":
    main()
