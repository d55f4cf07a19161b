"""`outrider top`: shows figures of each process, live in the terminal, or once as text or JSON."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from outrider.cli.failures import CommandFailed, standard_input, usage
from outrider.cli.observe.gauges import Reading, ReadingPair, figures, read
from outrider.runtime.log import escaped

TIMEOUT_S = 2.0
WIDTH = 150
MOST_BYTES = 8_000_000
DONE = 0


def metrics_of(arguments: Sequence[str]) -> list[str]:
    """Addresses of /metrics: arguments themselves, or addresses in the output of `outrider up --json`.

    The output is read from a file, or from standard input for `-`. Raises CommandFailed without an address.
    """
    found: list[str] = []
    for one in arguments:
        if one == "-":
            found += _announced(standard_input().readline(), "standard input")
        elif (path := Path(one)).is_file():
            found += _announced(_text_of(path), one)
        else:
            found.append(one)
    if not found:
        raise usage(
            "name at least one address of metrics, or the file with what `outrider up --json` printed"
        )
    return list(dict.fromkeys(found))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise usage(f"{path} cannot be read: {error.strerror}") from error


def _announced(text: str, where: str) -> list[str]:
    with suppress(ValueError, TypeError, LookupError):
        processes = json.loads(text.strip().splitlines()[0])["processes"]
        return [str(process["metrics"]) for process in processes]
    raise usage(f"{where} is not what `outrider up --json` printed: it lists no processes")


def url_of(address: str) -> str:
    """URL of the metrics at an address, which is host:port or a URL with or without its path."""
    url = address if "://" in address else f"http://{address}"
    return url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"


class Watched:
    """A process whose metrics are read repeatedly."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._last: Reading | None = None

    def look(self) -> dict[str, Any]:
        """Reads the metrics; returns figures since the last look (none at the first), or the error."""
        try:
            reading = self._read()
            before, self._last = self._last or reading, reading
            return {"address": self.address, **figures(ReadingPair(before, reading))}
        except (OSError, ValueError, HTTPException) as error:
            self._last = None
            return {"address": self.address, "error": _why(error)}

    def _read(self) -> Reading:
        request = urllib.request.Request(url_of(self.address))
        if request.type not in ("http", "https"):
            raise ValueError(f"{self.address} is no address of metrics: give host:port, or a URL")
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            text: str = answer.read(MOST_BYTES).decode("utf-8", "replace")
        return read(text, time.monotonic())


def _why(error: Exception) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return escaped(str(reason)) or type(error).__name__


def run_top(addresses: Sequence[str], *, interval_s: float, once: bool, as_json: bool) -> int:
    """Shows the table until Ctrl-C, or once; returns 1 where no process answered. Raises CommandFailed."""
    watched = [Watched(address) for address in metrics_of(addresses)]
    with ThreadPoolExecutor(min(32, len(watched))) as pool:

        def look() -> list[dict[str, Any]]:
            return list(pool.map(Watched.look, watched))

        look()
        time.sleep(interval_s)
        if once or as_json:
            return _once(look(), as_json=as_json)
        live = Live(table(look()), console=_console(), refresh_per_second=4)
        with suppress(KeyboardInterrupt), live:
            while True:
                time.sleep(interval_s)
                live.update(table(look()))
    return DONE


def _once(processes: list[dict[str, Any]], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"processes": processes}))
    else:
        _console().print(table(processes))
    if all("error" in process for process in processes):
        if not as_json:
            raise CommandFailed("none of them answers", "UNAVAILABLE")
        return 1
    return DONE


def _console() -> Console:
    """A console that prints the texts of processes as they are, without markup."""
    width = None if Console().is_terminal else WIDTH
    return Console(highlight=False, markup=False, emoji=False, width=width)


def table(processes: Sequence[dict[str, Any]]) -> Table:
    """The table, with one row per process."""
    shown = Table(box=None, pad_edge=False)
    for name in ("process", "at"):
        shown.add_column(name, no_wrap=True)
    for name in ("requests", "waiting", "per second", "acceptance", "KV", "step"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("more")
    for process in processes:
        role, at = process.get("role", "?"), process["address"]
        if "error" in process:
            shown.add_row(role, at, *("-",) * 6, f"does not answer: {process['error']}", style="red")
        else:
            shown.add_row(role, at, *_cells(process), escaped("; ".join(_more(process))))
    return shown


def _cells(one: dict[str, Any]) -> Iterator[str]:
    yield _number(one["requests"])
    yield _number(one.get("waiting", one.get("waiting_ids")))
    rate, unit = one.get("tokens_per_second"), "tokens"
    if rate is None:
        rate, unit = one.get("nodes_per_second"), "nodes"
    yield f"{_number(rate)} {unit}"
    share = one.get("committed_share", one.get("found_share"))
    yield _number(one["acceptance_length"], 2) if "acceptance_length" in one else _percent(share)
    yield _percent(one.get("kv")) if "kv" in one else _number(one.get("kv_slots"))
    yield _milliseconds(one.get("step_s", one.get("lookup_s")))


def _more(one: dict[str, Any]) -> Iterator[str]:
    for source, counts in one.get("sources", {}).items():
        yield f"{source} {_number(counts['accepted'])} of {_number(counts['verified'])}"
    if one["role"] == "orchestrator":
        yield f"peers {one['peers_up']} of {one['peers']}"
        yield f"store {one['store']}"
        if one["first_token_s"] is not None:
            yield f"first token {_milliseconds(one['first_token_s'])}"
        yield from (f"{reason} {count}" for reason, count in one["errors"].items())
    if one.get("failed_sessions"):
        yield f"{one['failed_sessions']} sessions failed"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{1000 * value:.2f} ms"
