"""The model card of a head: its target, its training text, the tenants, and its acceptance."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.heads.recipe import DistilOptions
from training.heads.rows import TrainingText

_FIGURES = ("data", "written", "divergence", "tokens", "window", "steps", "batch", "depth", "rate", "seed")
_NAMES = {
    "medusa": "Medusa heads",
    "blockwise": "Heads of blockwise decoding",
    "hydra": "Hydra heads",
    "eagle": "An EAGLE head",
    "eagle3": "An EAGLE-3 head",
    "mtp": "A module for multi-token prediction",
    "pass": "Look-ahead embeddings (PaSS)",
    "lm": "A small drafter",
    "block": "A block drafter",
}


def card(options: DistilOptions, text: TrainingText, result: dict[str, Any]) -> str:
    """The card as Markdown."""
    rows = [
        ("Kind, target", f"{options.kind}, for `{options.target}` alone"),
        ("Parameters", f"{result['parameters']:,}, {result['bytes'] / 1e6:.1f} MB in bfloat16"),
        ("Text", _text(options, text, result)),
        ("Tenants", _tenants(text)),
        (
            "Training",
            f"{result['steps']:,} steps of {options.batch:,} tokens, {options.depth} tokens ahead, "
            f"{options.divergence}; {result['training_seconds'] / 60:.0f} minutes of processor time",
        ),
        *((f"Held out, {name}", _acceptance(found)) for name, found in result["acceptance"].items()),
    ]
    rows += [
        (f"Beside `{options.boost_of}`, {name}", _both(found))
        for name, found in result.get("boost", {}).items()
    ]
    lines = [f"# {_NAMES[options.kind]} for {Path(options.target).name}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {what} |" for name, what in rows]
    lines += ["", "Made by", "", "```sh", command(options), "```", ""]
    lines += [
        f"Held-out acceptance: the target continued {result['held_out_prompts']} held-out prompts, "
        f"greedily and at temperature 0.8, and the head drafted chains of {result['depth']} tokens "
        "along the continuations. "
        '"Before" is the untrained head. The head drafts; the target decides every token.',
    ]
    if text.tenants:
        lines += [
            "",
            "**Deletion.** The weights hold what the head learnt from these tenants' outputs. `outrider "
            "memory forget` removes outputs from a retrieval worker, not from this head. To forget a "
            "tenant, delete this head, its work folder and the exported files, and train again without "
            "these outputs.",
        ]
    return "\n".join(lines) + "\n"


def command(options: DistilOptions) -> str:
    """The command line that made the head."""
    words = ["outrider", "distil", *map(str, options.text)]
    words += ["--kind", options.kind, "--target", options.target, "--out", str(options.out)]
    words += [word for path in options.past for word in ("--past", str(path))]
    words += [word for glob in options.globs for word in ("--glob", glob)]
    words += [] if options.held_out is None else ["--held-out", str(options.held_out)]
    words += [] if options.drafter is None else ["--drafter", options.drafter]
    if options.boost_of is not None:
        words += ["--boost-of", options.boost_of, "--boost", f"{options.boost:g}"]
    if options.draft_vocabulary:
        words += ["--draft-vocabulary", str(options.draft_vocabulary)]
    for name in _FIGURES:
        value = getattr(options, name)
        words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def _text(options: DistilOptions, text: TrainingText, result: dict[str, Any]) -> str:
    amounts = [f"{result['fixed_tokens']:,} tokens of text as it is"]
    for field, writer in (("written_tokens", "the target"), ("drafted_tokens", f"`{options.drafter}`")):
        if count := result[field]:
            amounts.append(
                f"{count:,} in rows whose second half {writer} wrote (every second row greedy, the others at "
                "temperature 0.8)"
            )
    parts = [f"{', '.join(amounts)}, from {text.documents:,} documents in {_named(options.text)}"]
    if text.left_out:
        parts.append(f"{text.left_out:,} documents left out because they nearly copy held-out text")
    if text.outputs_left_out:
        parts.append(
            f"{text.outputs_left_out:,} past outputs left out because they nearly copy held-out text"
        )
    return "; ".join(parts)


def _named(paths: Sequence[Path]) -> str:
    return ", ".join(f"`{path}`" for path in paths) or "no files"


def _tenants(text: TrainingText) -> str:
    """The tenants whose past outputs were used; each output was kept with its request's consent (`learn`)."""
    if not text.tenants:
        return "none: no past output was used"
    return ", ".join(
        f"`{tenant or '(without a name)'}` ({count:,} past outputs that `learn` allowed)"
        for tenant, count in sorted(text.tenants.items())
    )


def _both(found: dict[str, Any]) -> str:
    """What a first drafter accepts alone, and with this one beside it."""
    first, both = (found[name]["acceptance_length"] for name in ("first", "both"))
    return f"{both:.2f} tokens a round with the longer chain of the two, {first:.2f} with the first alone"


def _acceptance(found: dict[str, Any]) -> str:
    before, after = found["before"], found["after"]
    places = ", ".join(f"{share:.2f}" for share in after["by_place"])
    return (
        f"{after['acceptance_length']:.2f} tokens a round, {before['acceptance_length']:.2f} before; "
        f"right by place: {places}"
    )
