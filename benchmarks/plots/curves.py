"""What a benchmark's result looks like as curves: a pure function from the JSON object to panels of lines."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
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
    is_scatter: bool = False
    """Whether curves of one point each are compared by their places; the axis has ticks of its own."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A row of panels below one title."""

    title: str
    panels: tuple[Panel, ...]


def chart_of(result: Result) -> Chart:
    """The chart of a benchmark's last line. Raises KeyError for a benchmark without a curve."""
    machine = result["machine"]
    where = f"{machine['processor']}, {machine['cores']} cores, commit {result['commit']}"
    command = " ".join(filter(None, (result["name"], result.get("experiment"), _scale(result))))
    return Chart(f"outrider bench {command}: {where}", _PANELS[result["name"]](result))


def _scale(result: Result) -> str:
    """The flags that decide how much an experiment measured; empty for other benchmarks."""
    settings = result.get("settings", {})
    if "experiment" not in settings:
        return ""
    if settings["full"]:
        return "--full"
    return f"--prompts {settings['prompts']} --tokens {settings['tokens']}"


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


def _packed_step(result: Result) -> tuple[Panel, ...]:
    """One session's pass by rows, beside transformers' own; names are `ARM_ROWS` and `ARM_SESSIONSxROWS`."""
    arms: dict[str, dict[str, float]] = {}
    for name, spent in result["ms"].items():
        arm, _, shape = name.rpartition("_")
        sessions, _, rows = shape.rpartition("x")
        if sessions in ("", "1"):
            arms.setdefault(arm, {})[rows] = spent
    curves = [_by_number(arm, values, arm == "own") for arm, values in arms.items()]
    return (Panel("One pass of the target", "rows of one session", "ms", tuple(curves), is_log_x=True),)


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


def _proposers(result: Result) -> tuple[Panel, ...]:
    return tuple(
        _scatter(f"{mode}, streams: {streams}", figures)
        for mode, by_streams in result["figures"].items()
        for streams, figures in by_streams.items()
    )


def _scatter(title: str, figures: Mapping[str, Any]) -> Panel:
    """Methods by what they bring and cost; on a dashed line all are equally fast beside plain decoding.

    A line holds for rounds that take as long as plain decoding's but for the drafting, so a method whose rows
    make passes longer is slower than the line says.
    """
    plain_ms = figures["plain"]["round_ms"]
    points = [
        Curve(method, (row["draft_ms"],), (row["acceptance_length"] - 1,))
        for method, row in figures.items()
        if method != "plain"
    ]
    end_ms = max(0.1, *(float(x) for point in points for x in point.x)) * 1.1
    most = max(y for point in points for y in point.y)
    lines = [
        Curve(f"{speed:g}x plain", (0.0, end_ms), (speed - 1, speed * (1 + end_ms / plain_ms) - 1), True)
        for speed in _SPEEDS
        if speed - 1 <= most
    ]
    y_label = "accepted tokens a round"
    return Panel(title, "drafting, ms a round", y_label, (*points, *lines), is_scatter=True)


def _lookahead(result: Result) -> tuple[Panel, ...]:
    """Steps per token by rows of a step, a line for each size of n-grams, and what these rows cost."""
    panels = []
    for mode, rows in result["modes"].items():
        by_size: dict[int, list[Mapping[str, float]]] = {}
        for row in rows:
            by_size.setdefault(row["ngram"], []).append(row)
        curves = [
            _along(f"n-grams of {size}", of, "rows_per_step", "steps_per_token")
            for size, of in by_size.items()
        ]
        even = [{**row, "even": 1 / row["row_cost"]} for row in rows]
        curves.append(_along("as fast as plain decoding", even, "rows_per_step", "even", True))
        panels.append(Panel(mode, "rows of a step", "steps per token", tuple(curves), is_log_x=True))
    return tuple(panels)


def _layer_parts(result: Result) -> tuple[Panel, ...]:
    """Acceptance of the best skip set by the number of skipped sublayers, and the acceptance that pays."""
    panels = []
    for mode, found in result["modes"].items():
        curves = []
        for label, field in (("sublayers", "by_sublayers"), ("whole layers", "by_skipped")):
            even = _along(f"break-even, {label}", found[field], "sublayers", "break_even", True)
            curves += [
                _along(label, found[field], "sublayers", "acceptance"),
                replace(even, colour_of=label),
            ]
        panels.append(Panel(mode, "skipped sublayers", "share of the target's tokens", tuple(curves)))
    return tuple(panels)


def _along(
    label: str, rows: Iterable[Mapping[str, float]], x: str, y: str, is_reference: bool = False
) -> Curve:
    """The curve of two fields of some rows, in order of the first."""
    points = sorted((row[x], row[y]) for row in rows)
    return Curve(label, tuple(at for at, _ in points), tuple(value for _, value in points), is_reference)


def _spec_bench(result: Result) -> tuple[Panel, ...]:
    tasks = result["tasks"]
    names = tuple(task.replace("_", "\n") for task in tasks)
    return tuple(
        Panel(
            title,
            "",
            label,
            tuple(
                Curve(arm, names, tuple(of[arm][field] for of in tasks.values())) for arm in tasks["overall"]
            ),
        )
        for title, label, field in (
            ("Mean accepted tokens", "tokens per step", "mat"),
            ("Speed", "over plain", "speedup"),
        )
    )


def _compare(result: Result) -> tuple[Panel, ...]:
    figures = result["figures"]
    shown: tuple[tuple[str, str, Callable[[Mapping[str, Any]], float]], ...] = (
        ("All requests together", "tokens/s", lambda level: level["tokens_per_second"]),
        ("To the first token", "ms (p50)", lambda level: level["first_token_ms"]["p50"]),
        ("Between events", "ms (p99)", lambda level: level["gap_ms"]["p99"]),
    )
    return tuple(
        Panel(
            title,
            "requests at a time",
            label,
            tuple(
                _by_number(name, {level: value(found) for level, found in levels.items()})
                for name, levels in figures.items()
            ),
            is_log_x=True,
        )
        for title, label, value in shown
    )


def _edge(result: Result) -> tuple[Panel, ...]:
    """Modes by round trip; distances with loss are left out, because a line is for one kind of link."""
    places = [at for at, loss in enumerate(result["loss"]) if not loss]
    rtt_ms = tuple(result["rtt_ms"][at] for at in places)

    def curves(field: str, label: str = "{}", is_reference: bool = False) -> list[Curve]:
        return [
            Curve(label.format(arm), rtt_ms, tuple(row[at] for at in places), is_reference, arm)
            for arm, row in result[field].items()
        ]

    predicted = curves("predicted_ms_per_token", "{}, predicted", is_reference=True)
    x_label = "round trip, ms"
    return (
        Panel("Time per token", x_label, "ms", (*curves("ms_per_token"), *predicted), is_log_x=True),
        Panel("Passes of the target", x_label, "per token", tuple(curves("rounds_per_token")), is_log_x=True),
    )


def _experiments(result: Result) -> tuple[Panel, ...]:
    """An experiment says itself what its curves are."""
    return tuple(
        Panel(
            **{
                **panel,
                "curves": tuple(
                    Curve(**{**curve, "x": tuple(curve["x"]), "y": tuple(curve["y"])})
                    for curve in panel["curves"]
                ),
            }
        )
        for panel in result["panels"]
    )


_SPEEDS = (1.0, 1.5, 2.0, 3.0, 4.0)
"""Multiples of plain decoding's speed that have a line."""


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
    "packed_step": _packed_step,
    "proposers": _proposers,
    "lookahead": _lookahead,
    "layer_parts": _layer_parts,
    "spec_bench": _spec_bench,
    "compare": _compare,
    "edge": _edge,
    "experiments": _experiments,
}
