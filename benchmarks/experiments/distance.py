"""X15: at which network distance drafts from elsewhere stop paying, on a virtual clock over real drafts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.experiments.chains import run_length
from benchmarks.experiments.experiment import Experiment, Judged, Rows, line, where
from benchmarks.experiments.pair import ModelPair, Scale, rights
from benchmarks.plots.curves import Curve, Panel
from benchmarks.shared.resumable import Key
from outrider.edge.latency_model import Conditions, Mode, best_window, break_even_rtt_ms, predict

RTTS_MS = (0.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 80.0, 100.0, 150.0, 200.0)
DRAFT_MS = 1.0
VERIFY_MS = (20.0, 50.0)
PIPELINE_WINDOW = 8


def waiting(right: Sequence[bool], at: Conditions, window: int) -> tuple[float, int]:
    """Milliseconds and passes where the target waits for one window at a time."""
    place = passes = 0
    ms = 0.0
    while place < len(right):
        drafted = min(window, len(right) - 1 - place)
        ms += drafted * at.draft_ms + at.rtt_ms + at.verify_ms
        place += run_length(right, place, drafted) + 1
        passes += 1
    return ms, passes


def pipelined(right: Sequence[bool], at: Conditions, window: int) -> tuple[float, int]:
    """Milliseconds and passes where windows follow each other until one holds a wrong token.

    The windows behind a wrong token are dropped, and the device drafts anew once it has heard of it. Behind
    a window that was right as a whole the next one follows without a token of the target's own.
    """
    place = passes = 0
    began_ms = verified_ms = 0.0
    while place < len(right):
        run = run_length(right, place, len(right) - place)
        windows = run // window + 1
        for number in range(windows):
            arrived_ms = began_ms + (number + 1) * window * at.draft_ms + at.rtt_ms / 2
            verified_ms = max(verified_ms, arrived_ms) + at.verify_ms
            passes += 1
        place += run + 1
        began_ms = verified_ms + at.rtt_ms / 2
    return verified_ms, passes


def hinting(right: Sequence[bool], at: Conditions, window: int) -> tuple[float, int]:
    """Milliseconds and passes where the target never waits and takes the drafts that have arrived."""
    now = began_ms = 0.0
    place = first = passes = 0
    while place < len(right):
        arrived = int(max(0.0, (now - at.rtt_ms / 2 - began_ms) / at.draft_ms)) + first
        accepted = 0
        if place >= first and run_length(right, first, place - first) == place - first:
            accepted = run_length(right, place, max(0, min(arrived, len(right) - 1) - place))
        now += at.verify_ms
        passes += 1
        place += accepted + 1
        heard_ms = now + at.rtt_ms / 2
        drafted = first + int((heard_ms - began_ms) / at.draft_ms)
        was_right = run_length(right, first, place - first) == place - first
        if not was_right or drafted < place:
            first, began_ms = place, heard_ms
    return now, passes


SIMULATED: Mapping[Mode, Callable[[Sequence[bool], Conditions, int], tuple[float, int]]] = {
    Mode.WAITING: waiting,
    Mode.PIPELINED: pipelined,
    Mode.HINTING: hinting,
}


def keys(scale: Scale) -> list[Key]:
    """An arm for each time of a target's pass."""
    return [(verify_ms,) for verify_ms in VERIFY_MS]


def measure(pair: ModelPair, key: Key) -> dict[str, Any]:
    """Milliseconds and passes per token by mode and distance, beside the prediction by formulas."""
    verify_ms = float(key[0])
    texts = rights(pair.drafter, pair.texts(0.0))
    tokens = sum(map(len, texts))
    alpha = sum(map(sum, texts)) / tokens
    points = []
    for rtt_ms in RTTS_MS:
        at = Conditions(alpha, DRAFT_MS, verify_ms, rtt_ms)
        for mode, simulate in SIMULATED.items():
            window = best_window(at) if mode is Mode.WAITING else PIPELINE_WINDOW
            done = [simulate(right, at, window) for right in texts]
            points.append(
                {
                    "rtt_ms": rtt_ms,
                    "mode": mode.value,
                    "ms_per_token": round(sum(ms for ms, _ in done) / tokens, 3),
                    "predicted": round(predict(mode, at, window).ms_per_token, 3),
                    "rounds_per_token": round(sum(passes for _, passes in done) / tokens, 4),
                }
            )
    at = Conditions(alpha, DRAFT_MS, verify_ms, 0.0)
    return {
        "verify_ms": verify_ms,
        "alpha": round(alpha, 4),
        "points": points,
        "break_even_ms": {
            mode.value: {
                "simulated": crossing([point for point in points if point["mode"] == mode], verify_ms),
                "predicted": round(break_even_rtt_ms(mode, at), 1),
            }
            for mode in (Mode.WAITING, Mode.PIPELINED)
        },
    }


def crossing(points: Sequence[Mapping[str, Any]], cloud_ms: float) -> float | None:
    """The distance from which a mode is slower than the cloud alone; None: at no distance here."""
    before: Mapping[str, Any] | None = None
    for point in points:
        if point["ms_per_token"] > cloud_ms:
            if before is None:
                return 0.0
            over = (cloud_ms - before["ms_per_token"]) / (point["ms_per_token"] - before["ms_per_token"])
            return round(float(before["rtt_ms"] + over * (point["rtt_ms"] - before["rtt_ms"])), 1)
        before = point
    return None


def judge(rows: Rows) -> Sequence[Judged]:
    """Holds the predictions against the rows."""
    near = where(rows, verify_ms=VERIFY_MS[0])[0]["break_even_ms"][Mode.WAITING]
    far = where(rows, verify_ms=VERIFY_MS[1])[0]["break_even_ms"][Mode.WAITING]
    hints = [
        point["ms_per_token"] / row["verify_ms"]
        for row in rows
        for point in where(row["points"], mode=Mode.HINTING)
    ]
    off = [
        abs(point["predicted"] / point["ms_per_token"] - 1)
        for row in rows
        for point in where(row["points"], mode=Mode.WAITING)
    ]
    ratio = (far["simulated"] or 0) / (near["simulated"] or 1)
    return (
        Judged(
            f"{near['simulated']} ms (the formula: {near['predicted']})", 45 <= (near["simulated"] or 0) <= 75
        ),
        Judged(f"{far['simulated']} ms at 50 ms a pass, {ratio:.1f} times as far", 2 <= ratio <= 3),
        Judged(f"at most {max(hints):.3f} of the cloud's time", max(hints) <= 1.001),
        Judged(f"the waiting mode's formula is off by at most {max(off):.2f}", max(off) <= 0.15),
    )


def panels(rows: Rows) -> Sequence[Panel]:
    """Milliseconds a token over the round trip, with the formulas' curves."""
    found = []
    for row in rows:
        curves: list[Curve] = []
        for mode in SIMULATED:
            points = where(row["points"], mode=mode)
            curves.append(line(mode.value, points, "rtt_ms", "ms_per_token"))
            curves.append(
                Curve(f"{mode.value}, formula", RTTS_MS, tuple(p["predicted"] for p in points), True, mode)
            )
        cloud = (row["verify_ms"],) * len(RTTS_MS)
        curves.append(Curve("cloud alone", RTTS_MS, cloud))
        title = f"{row['verify_ms']:g} ms a pass, {DRAFT_MS:g} ms a drafted token"
        found.append(Panel(title, "round trip, ms", "ms per token", tuple(curves)))
    return found


X15 = Experiment(
    name="X15",
    question="Which network distance kills the gain of drafts from a client's device?",
    predictions=(
        "at 20 ms a pass and 1 ms a drafted token, waiting for drafts is slower than the cloud alone from "
        "about 60 ms on (45 to 75)",
        "at 50 ms a pass the limit is 2 to 3 times as far: the limit grows with the time of a pass",
        "a target that never waits for hints is never slower than the cloud alone",
        "the waiting mode's formula, which takes tokens as independent, is right within 15 %",
    ),
    refuted_by="a limit outside 45 to 75 ms, or hints that slow the target down",
    keys=keys,
    measure=measure,
    judge=judge,
    panels=panels,
)
