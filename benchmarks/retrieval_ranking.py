"""What ranking by the session's noise gains over ranking by counts alone, per round and without processes.

The target's own continuations of held-out prompts are computed first; drafts never change them. Then every
round looks the committed ids up in one memory, ranks what was found both ways, and takes the path of the best
nodes that the target took. Memories: the demonstration's corpus, and past outputs of the same prompts under
other seeds. Run `python benchmarks/retrieval_ranking.py`. The last line is one JSON object.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from envelope import REPOSITORY

from outrider.cli.local.demo_corpus import demo_corpus
from outrider.lm.packed import PackedLM
from outrider.pair.simulation import Truth, continuation
from outrider.tokens import TokenTable
from retrieval_service.corpus.index import CorpusIndex
from retrieval_service.past.outputs import PastOutputs
from retrieval_service.ranking import DraftShape, rank
from retrieval_service.trie import Memory
from speculative.draft import Draft
from speculative.params import SamplingParams
from speculative.tree import ROOT

GREEDY = SamplingParams(temperature=0)
WINDOW = 64
PAST_SEED = 1000
"""Seeds of past outputs begin here, away from those that are measured."""


def accepted(draft: Draft | None, ahead: tuple[int, ...]) -> int:
    """How many of the target's next ids are a path of the draft from its root."""
    node, length = ROOT, 0
    children = (
        {}
        if draft is None
        else {
            (parent, token): node
            for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True))
        }
    )
    while length < len(ahead) and (node, ahead[length]) in children:
        node, length = children[node, ahead[length]], length + 1
    return length


def rounds(
    truth: Truth, memory: Memory, params: SamplingParams, shape: DraftShape, stated: list[float]
) -> int:
    """Rounds of one request with drafts of this memory alone, ranked with these parameters.

    `stated` gains, for every node sent, its survival and whether it was accepted.
    """
    position, count = truth.prompt_length, 0
    while position < len(truth.ids):
        ids = truth.ids[max(0, position - WINDOW) : position]
        trie = memory.lookup(ids, node_limit=3 * shape.nodes, depth=shape.depth)
        draft = None if trie is None else rank(trie, params, truth.seed, position, shape, shape.nodes)
        length = accepted(draft, truth.ids[position:])
        if draft is not None:
            stated.append(sum(draft.survival) - length)
        position += length + 1
        count += 1
    return count


def measure(
    truths: list[Truth], memories: list[Memory], params: SamplingParams, shape: DraftShape
) -> dict[str, float]:
    """Acceptance length, and how far the summed survival of a draft is from what of it was accepted."""
    stated: list[float] = []
    made = sum(len(truth.ids) - truth.prompt_length for truth in truths)
    count = sum(
        rounds(truth, memory, params, shape, stated) for truth, memory in zip(truths, memories, strict=True)
    )
    return {
        "acceptance_length": round(made / count, 3),
        "overstated": round(sum(stated) / max(1, len(stated)), 3),
    }


def past_of(target: PackedLM, truth: Truth, tokens: int, outputs: int) -> Memory:
    """Past outputs of the same prompt under other seeds, plainly decoded."""
    past = PastOutputs(None)
    prompt = truth.ids[: truth.prompt_length]
    for seed in range(PAST_SEED, PAST_SEED + outputs):
        earlier = continuation(target, prompt, truth.params, seed, tokens)
        past.extend("tenant", str(seed), earlier.ids[earlier.prompt_length :])
        past.finish("tenant", str(seed))
    return past.memory("tenant")


def flags() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the last line only")
    parser.add_argument("--target", type=Path, default=REPOSITORY / "models/target")
    parser.add_argument("--prompts", type=Path, default=REPOSITORY / "models/heldout.jsonl")
    parser.add_argument("--count", type=int, default=8, help="prompts used")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt")
    parser.add_argument("--outputs", type=int, default=4, help="past outputs per prompt")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32])
    return parser.parse_args()


def main() -> None:
    """Compares the two ways to rank."""
    args, started = flags(), time.perf_counter()
    target = PackedLM.load(args.target, check=False)
    tokens = TokenTable.from_json(target.tokenizer_json or "")
    corpus = CorpusIndex.open(demo_corpus(tokens, args.prompts), tokens.digest)
    params = SamplingParams(temperature=args.temperature)
    prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines()[: args.count]]
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
            shape = DraftShape(nodes=nodes)
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
