"""What an app reads of a device's contribution to a request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """A device's contribution to one request, with its mode and the reason for the mode."""

    mode: str
    """The last mode: cloud, hinting, waiting or pipelined."""
    why: str
    """The reason for the mode, in words."""
    trouble: str
    """Reason why the device does not draft, for good or until its model answers again; empty while the device
    drafts."""
    drafted: int
    """Tokens drafted, sent or not."""
    sent: int
    """Tokens sent."""
    windows: int
    """Windows sent."""
    equal: int
    """Drafted tokens that the target chose as well."""
    wrong: int
    """Drafted tokens in whose place the target chose another token; the tokens behind them do not count."""
    bytes_up: int
    """Bytes of the messages with drafts, without framing."""
    bytes_down: int
    """Bytes of the messages received, without framing."""
    changes: tuple[tuple[int, str], ...]
    """Each mode with the number of tokens before the mode began."""
