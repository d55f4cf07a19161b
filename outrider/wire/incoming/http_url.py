"""URLs and Host headers, read without an error for those that are none. Pure."""

from urllib.parse import SplitResult, urlsplit


def http_url(url: str) -> SplitResult | None:
    """The parts of an http or https URL with a host; None for any other text."""
    try:
        split = urlsplit(url)
        usable = split.scheme in ("http", "https") and split.hostname and split.port != 0
    except ValueError:  # a port that is no number or above 65535, or a broken IPv6 address
        return None
    return split if usable and url.isprintable() and " " not in url else None


def named_host(header: str) -> str:
    """The host that a Host header names, without the port; empty for a header that names none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def path_of(target: str) -> str:
    """The path of a request's target; empty for a target that has none."""
    try:
        return urlsplit(target).path
    except ValueError:
        return ""
