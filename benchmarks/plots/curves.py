"""What a benchmark's result looks like as curves: a pure function from the JSON object to panels of lines."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Curve:
    """A named line of a panel."""

    label: str
    x: tuple[float | str, ...]
    """Places on the axis; texts are categories in their order, drawn as bars."""
    y: tuple[float, ...]
    is_reference: bool = False
    """Whether the line is something to compare with, and is drawn dashed."""
    colour_of: str = ""
    """Label of the line whose colour this line shares; empty: a colour of its own."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    is_log_x: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A row of panels below one title."""

    title: str
    panels: tuple[Panel, ...]


def chart_of(result: Result) -> Chart:
    """The chart of a benchmark's last line. Raises KeyError for a benchmark without a curve."""
    machine = result["machine"]
    where = f"{machine['processor']}, {machine['cores']} cores, commit {result['commit']}"
    return Chart(f"outrider bench {result['name']}: {where}", _PANELS[result["name"]](result))


def _load(result: Result) -> tuple[Panel, ...]:
    streams = tuple(result["concurrency"])
    rates = [Curve(arm, streams, tuple(values)) for arm, values in result["tokens_per_second"].items()]
    gaps = [
        Curve(arm, streams, tuple(gap["p99"] for gap in values)) for arm, values in result["gap_ms"].items()
    ]
    return (
        _over_streams("All streams together", "tokens/s", rates),
        _over_streams("Gap between two messages of a stream", "ms (p99)", gaps),
    )


def _vocabulary(result: Result) -> tuple[Panel, ...]:
    panels = []
    for size, ours in result["tokens_per_second"].items():
        theirs = result.get("generate_tokens_per_second", {}).get(size, {})
        for head in next(iter(ours.values())):
            curves = [_by_number(arm, heads[head]) for arm, heads in ours.items()]
            curves += [
                _by_number(f"generate, {arm}", heads[head], True, arm) for arm, heads in theirs.items()
            ]
            panels.append(_over_streams(f"{int(size):,} ids, {head} head", "tokens/s", curves))
    return tuple(panels)


def _retrieval(result: Result) -> tuple[Panel, ...]:
    requests = {arm: _by_requests(result[field]) for arm, field in _PAST_FIELDS.items()}
    past = [_by_number(arm, values, arm != "ours") for arm, values in requests.items() if values]
    corpus = [_by_number("corpus", result["corpus_by_tokens"])]
    return (
        Panel(
            "Corpus of other text", "tokens of the corpus", "acceptance length", tuple(corpus), is_log_x=True
        ),
        Panel("Past outputs of one template", "earlier requests", "acceptance length", tuple(past)),
    )


_PAST_FIELDS = {"ours": "acceptance_length_by", "arctic-inference": "past_by_arctic"}


def _by_requests(values: Mapping[str, float | None]) -> dict[str, float]:
    """Acceptance lengths of past outputs by the number of earlier requests."""
    found = {name.removeprefix("past_"): value for name, value in values.items() if name.startswith("past_")}
    return {requests: value for requests, value in found.items() if value is not None}


def _chaos(result: Result) -> tuple[Panel, ...]:
    faults = {
        f"{role}\n{kind} ({pause['faults']})": pause
        for role, kinds in result["by_fault"].items()
        for kind, pause in kinds.items()
        if pause["p50"] is not None
    }
    curves = [
        Curve(share, tuple(faults), tuple(pause[share] for pause in faults.values()))
        for share in ("p50", "p99")
    ]
    return (Panel("Longest silence of a stream around a fault", "", "s", tuple(curves)),)


def _peers(result: Result) -> tuple[Panel, ...]:
    rates = result["tokens_per_second"]
    panels = []
    for temperature, by_streams in rates["hf_generate"].items():
        for streams, by_threads in by_streams.items():
            here = {arm: of[temperature][streams] for arm, of in rates.items() if streams in of[temperature]}
            arms = tuple(arm.replace("_", "\n") for arm in here)
            curves = [
                Curve(f"threads: {threads}", arms, tuple(of[threads] for of in here.values()))
                for threads in by_threads
            ]
            panels.append(
                Panel(f"temperature {temperature}, streams: {streams}", "", "tokens/s", tuple(curves))
            )
    return tuple(panels)


def _over_streams(title: str, y_label: str, curves: Iterable[Curve]) -> Panel:
    return Panel(title, "streams", y_label, tuple(curves), is_log_x=True)


def _by_number(
    label: str, values: Mapping[str, float], is_reference: bool = False, colour_of: str = ""
) -> Curve:
    """A curve of values whose keys are numbers, in the numbers' order."""
    ordered = sorted((float(number), value) for number, value in values.items())
    return Curve(label, tuple(x for x, _ in ordered), tuple(y for _, y in ordered), is_reference, colour_of)


_PANELS: Mapping[str, Callable[[Result], tuple[Panel, ...]]] = {
    "load": _load,
    "vocabulary": _vocabulary,
    "retrieval": _retrieval,
    "chaos": _chaos,
    "peers": _peers,
}
