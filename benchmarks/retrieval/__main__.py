"""Measures the retrieval worker's memories: time to build, search and insert, and what each gains.

Run as `outrider bench retrieval --tokens N --json`. docs/figures/retrieval.md says what each field means.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.retrieval.acceptance import corpus_figures, past_figures, session_only
from benchmarks.retrieval.corpus_cost import GENERATOR, build_figures, draw_contexts, lookup_figures
from benchmarks.retrieval.documents_gain import figures as dense_figures
from benchmarks.retrieval.past_cost import measure_apart
from benchmarks.retrieval.teacher_forced import held_out_continuations
from benchmarks.shared.envelope import MODELS, command_line, print_result, settings_of

PAST_COUNTS = (0, 100, 1000)
"""Numbers of earlier requests that past outputs hold."""


def parse() -> argparse.Namespace:
    """Parses the flags; the figures in the docs have the default flags."""
    parser = command_line("retrieval", __doc__, is_curve=True)
    parser.add_argument("--tokens", type=int, default=10_000_000, help="tokens of the synthetic corpus")
    parser.add_argument("--vocabulary", type=int, default=50_000, help="vocabulary of the synthetic corpus")
    parser.add_argument(
        "--insert-tokens", type=int, default=1_000_000, help="tokens inserted into past outputs"
    )
    parser.add_argument("--lookups", type=int, default=2_000, help="different contexts looked up")
    parser.add_argument(
        "--prompts", type=int, default=24, help="prompts of the held-out text, and requests of the template"
    )
    parser.add_argument("--past", type=int, default=1000, help="most earlier requests that past outputs hold")
    parser.add_argument("--new-tokens", type=int, default=128, help="new tokens per prompt")
    parser.add_argument("--distractors", type=int, default=200, help="documents beside the right one")
    parser.add_argument("--target", type=Path, default=MODELS / "target", help="folder of the target model")
    return parser.parse_args()


def acceptance(settings: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The fields that say what each memory gains."""
    model = settings.target
    written = held_out_continuations(model, settings.prompts, settings.new_tokens)
    by_size = corpus_figures(model, written, folder)
    counts = [count for count in PAST_COUNTS if count <= settings.past]
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
    """Measures and prints the result."""
    settings, started = parse(), time.perf_counter()
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)
        fields: dict[str, Any] = {
            "generator": GENERATOR,
            "build": build_figures(folder / "corpus", settings.tokens, settings.vocabulary),
        }
        print(f"built: {fields['build']}", file=sys.stderr)
        contexts = draw_contexts(settings.tokens, settings.vocabulary, settings.lookups)
        fields["lookup_ms"] = lookup_figures(folder / "corpus", contexts)
        print(f"looked up: {fields['lookup_ms']}", file=sys.stderr)
        inserted = measure_apart("memory", settings.insert_tokens)
        assert inserted is not None
        fields["insert_tokens_per_second"] = inserted["insert_tokens_per_second"]
        fields["memory_bytes_per_token"] = inserted["memory_bytes_per_token"]
        fields["past_lookup_ms"] = inserted["lookup_ms"]
        fields["arctic_inference"] = measure_apart("arctic", settings.insert_tokens)
        fields |= acceptance(settings, folder)
    shown = {key: str(value) for key, value in settings_of(settings).items()}
    print_result("retrieval", shown, started, fields, settings.plot)


if __name__ == "__main__":
    main()
