"""How the device is used, as a page for people; pure."""

from collections.abc import Mapping
from html import escape
from typing import Any

_STYLE = (
    "body{font:16px sans-serif;max-width:50em;margin:2em auto;padding:0 1em}td,th{padding:.2em 1em .2em 0}"
)
_COUNTS = ("drafted", "sent", "equal", "wrong", "windows", "bytes_up", "bytes_down")
_MEASURED = ("rtt_ms", "jitter_ms", "draft_ms", "acceptance")


def page_of(explained: Mapping[str, Any]) -> bytes:
    """The page, which loads itself again every two seconds.

    Args:
        explained: what `EdgeEndpoint.explain` gives.
    """
    head = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>Device</title>'
    parts = [f"{head}<style>{_STYLE}</style><h1>How the device is used</h1>"]
    device, seen = explained["device"], explained["explain"]
    if device is None:
        return f"{parts[0]}<p>The device has not drafted for a request yet.</p>".encode()
    parts.append(f"<p><b>{escape(device['mode'])}</b>: {escape(device['trouble'] or device['why'])}</p>")
    predicted, measured = seen["predicted_ms_per_token"], seen["measured_ms_per_token"]
    modes = [(mode, predicted.get(mode), measured.get(mode)) for mode in {**predicted, **measured}]
    parts.append(_table(("ms per token", "predicted", "measured"), modes))
    parts.append(_table(("measured", ""), [(name, seen[name]) for name in _MEASURED]))
    parts.append(_table(("latest request", ""), [(name, device[name]) for name in _COUNTS]))
    parts.append(_table(("from token", "mode"), seen["changes"]))
    return "".join(parts).encode()


def _table(names: tuple[str, ...], rows: list[Any]) -> str:
    head = "".join(f"<th align=left>{escape(name)}" for name in names)
    return f"<table><tr>{head}{''.join('<tr>' + ''.join(map(_cell, row)) for row in rows)}</table>"


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"<td>{escape(text)}"
