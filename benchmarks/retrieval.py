"""The retrieval worker's memories: building, searching, feeding, and what each gains.

Run as `outrider bench retrieval --tokens N --json`. docs/figures.md says what each field means.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from envelope import REPOSITORY, print_result
from retrieval_acceptance import corpus_figures, held_out, past_figures, session_only
from retrieval_corpus import GENERATOR, build_part, contexts, lookup_part
from retrieval_dense import figures as dense_figures
from retrieval_past import measured

PAST = (0, 100, 1000)


def parse() -> argparse.Namespace:
    """Flags; the defaults are the figures of the docs."""
    parser = argparse.ArgumentParser(prog="outrider bench retrieval", description=__doc__)
    parser.add_argument("--tokens", type=int, default=10_000_000, help="of the synthetic corpus")
    parser.add_argument("--vocabulary", type=int, default=50_000, help="of that corpus")
    parser.add_argument("--insert-tokens", type=int, default=1_000_000, help="fed to past outputs")
    parser.add_argument("--lookups", type=int, default=2_000, help="different contexts looked up")
    parser.add_argument("--prompts", type=int, default=24, help="of the held-out text, and of the template")
    parser.add_argument("--past", type=int, default=1000, help="the most earlier requests")
    parser.add_argument("--new-tokens", type=int, default=128, help="per prompt")
    parser.add_argument("--distractors", type=int, default=200, help="documents beside the right one")
    parser.add_argument("--target", type=Path, default=REPOSITORY / "models" / "target")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry")
    return parser.parse_args()


def acceptance(settings: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything that says what a memory gains."""
    model, written = (
        settings.target,
        held_out(settings.target, settings.prompts, settings.new_tokens),
    )
    by_size = corpus_figures(model, written, folder)
    counts = [count for count in PAST if count <= settings.past]
    past, arctic = past_figures(model, counts, settings.prompts, settings.new_tokens)
    dense = dense_figures(
        model, prompts=settings.prompts, tokens=settings.new_tokens, distractors=settings.distractors
    )
    by = {"session_only": session_only(written), "corpus": by_size[max(by_size, key=int)], **past}
    greedy = dense["acceptance_length_greedy"]
    by |= {arm: greedy[arm] for arm in ("dense_verbatim", "dense_renamed", "dense_absent")}
    return {
        "acceptance_length_by": by,
        "corpus_by_tokens": by_size,
        "past_by_arctic": arctic,
        "dense_of_text": dense["acceptance_length_of_text"],
    }


def main() -> None:
    """Measure, print."""
    settings, started = parse(), time.perf_counter()
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)
        fields: dict[str, Any] = {
            "generator": GENERATOR,
            "build": build_part(folder / "corpus", settings.tokens, settings.vocabulary),
        }
        print(f"built: {fields['build']}", file=sys.stderr)
        asked = contexts(settings.tokens, settings.vocabulary, settings.lookups)
        fields["lookup_ms"] = lookup_part(folder / "corpus", asked)
        print(f"looked up: {fields['lookup_ms']}", file=sys.stderr)
        inserted = measured("memory", settings.insert_tokens)
        assert inserted is not None
        fields["insert_tokens_per_second"] = inserted["insert_tokens_per_second"]
        fields["memory_bytes_per_token"] = inserted["memory_bytes_per_token"]
        fields["past_lookup_ms"] = inserted["lookup_ms"]
        fields["arctic_inference"] = measured("arctic", settings.insert_tokens)
        fields |= acceptance(settings, folder)
    shown = {key: str(value) for key, value in vars(settings).items() if key != "json"}
    print_result("retrieval", shown, started, fields)


if __name__ == "__main__":
    main()
