"""The models of `outrider up`: finds target and drafter, chooses a drafter, downloads what is missing.

Everything that can be refused without weights is refused before weights are downloaded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.cli.failures import CommandFailed
from outrider.cli.local.progress_view import amount
from outrider.cli.local.up_settings import AUTO, DRAFTER, EMBEDDED, NONE, StackOptions, drafter_names
from outrider.hub.download import DownloadView
from outrider.hub.finding import FoundModel, fetch_weights, find_model, read_config
from outrider.lm.load.quantised import check_readable, method_of
from outrider.pair.beforehand import tokenizer_difference
from outrider.pair.candidates import suggest_drafter
from outrider.pair.known_heads import known_head

Say = Callable[[str], None]
"""Tells the user one line."""


@dataclass(frozen=True, slots=True)
class ReadyModels:
    """The models of a stack, whole on this machine."""

    options: StackOptions
    """The options with the models that were decided."""
    drafter: str
    """The drafter with the reason for it, in words."""


def ready_models(options: StackOptions, view: DownloadView, say: Say) -> ReadyModels:
    """Finds and downloads the models of a stack. Raises OutriderError, CommandFailed."""
    named_target, named_drafters = options.models()
    target = _readable(named_target, say)
    why = ""
    if named_drafters == (AUTO,):
        choice = suggest_drafter(target)
        for name, reason in choice.passed_over:
            say(f"{name} does not draft: {reason}")
        named_drafters, why = (choice.drafter,) if choice.drafter else (), choice.why
    drafters = [_readable(drafter, say) for drafter in named_drafters]
    for drafter in drafters:
        if not why:
            _check_tokenizers(target, drafter)
            continue
        missing = f", {amount(drafter.missing_bytes)} to download" if drafter.missing_bytes else ""
        say(f"the drafter is {drafter.text}: {why}{missing}; --drafter none does without")
    decided = replace(
        options,
        target=named_target,
        drafter=",".join(named_drafters) or NONE,
        heads=_heads(options, named_target, say),
        target_folder=str(target.folder),
    )
    decided.models()  # refuses to serve a drafter where none was found
    for model in (target, *drafters):
        fetch_weights(model, view)
    return ReadyModels(decided, _described(named_drafters, why, options))


def _heads(options: StackOptions, target: str, say: Say) -> tuple[str, ...]:
    """The heads, with `auto` replaced by the head that is known for the target, if there is one."""
    if AUTO not in options.heads:
        return options.heads
    found = known_head(target, EMBEDDED)
    none = f"no head drafts: none is known for {target}"
    say(f"the head is {found}; --heads none does without" if found else none)
    named = (found if head == AUTO else head for head in options.heads)
    return tuple(dict.fromkeys(head for head in named if head))


def _readable(text: str, say: Say) -> FoundModel:
    """The model, refused if its weights need packages that are not installed."""
    model = find_model(text)
    if model.note:
        say(model.note)
    check_readable(text, method_of(read_config(model.folder)))
    return model


def _check_tokenizers(target: FoundModel, drafter: FoundModel) -> None:
    if difference := tokenizer_difference(str(target.folder), str(drafter.folder)):
        raise CommandFailed(
            f"drafter {drafter.text} cannot draft for {target.text}: their tokenizers differ: {difference}; "
            "give a drafter of the target's tokenizer, --drafter auto, or --drafter none"
        )


def _described(drafters: Sequence[str], why: str, options: StackOptions) -> str:
    """The drafters in words: of several, each behind its name as a source."""
    if len(drafters) > 1:
        names = drafter_names(len(drafters), options.overrides.text(DRAFTER, "name") or DRAFTER)
        return ", ".join(f"{name} = {drafter}" for name, drafter in zip(names, drafters, strict=True))
    if drafters:
        return f"{drafters[0]}: {why}" if why else drafters[0]
    return f"none: {why}" if why else "none: lookup drafts alone"
