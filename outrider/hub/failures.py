"""Failures of a hub as errors that say what to do, instead of the library's exceptions."""

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from speculative.errors import InvalidRequest, OutriderError, PermissionDenied, Unauthenticated, Unavailable


class HubStalled(Exception):
    """No byte of a file arrived for too long."""


class AnsweredHtml(Exception):
    """The hub sent a web page in place of a file."""


class BadListing(Exception):
    """The hub describes a model by what cannot be a commit or a digest; both name files in the cache."""


class WrongContent(Exception):
    """A complete file differs from the hub's announced digest; the copy is deleted."""


def failure_of(error: BaseException, model: str) -> OutriderError:
    """The error to report for an exception that came up while `model` was looked up or downloaded."""
    hub = constants.ENDPOINT
    name = model.partition("@")[0]
    if isinstance(error, OutriderError):
        return error
    if isinstance(error, HFValidationError):
        return InvalidRequest(f"{model!r} is not a model id: give ORG/NAME, ORG/NAME@REVISION or a folder")
    if isinstance(error, RevisionNotFoundError):
        return InvalidRequest(f"model {model!r} has no such revision at {hub}: see {hub}/{name}/commits/main")
    if isinstance(error, GatedRepoError):
        return PermissionDenied(
            f"model {model!r} is gated: accept its terms at {hub}/{name}, then set HF_TOKEN to a token of "
            f"that account ({hub}/settings/tokens), or run `hf auth login`"
        )
    if isinstance(error, HfHubHTTPError):
        return _refused(error, model, hub)
    if isinstance(error, AnsweredHtml):
        return Unavailable(
            f"{hub} answered with a web page in place of {error}: a login page of this network or a proxy, "
            "or HF_ENDPOINT is not a hub; open the address in a browser, then try again"
        )
    if isinstance(error, BadListing):
        return Unavailable(
            f"the answer of {hub} about model {model!r} cannot be used: {error}, and no hexadecimal hash; "
            "HF_ENDPOINT has to be the address of a hub"
        )
    if isinstance(error, HubStalled | WrongContent):
        return Unavailable(f"model {model!r} was not downloaded: {error}")
    if isinstance(error, OSError):
        return Unavailable(
            f"model {model!r} cannot be written to {constants.HF_HUB_CACHE}: {error}; make room there, or "
            "set HF_HOME to another folder"
        )
    if isinstance(error, ValueError):  # JSON was expected
        return failure_of(AnsweredHtml("an answer about the model"), model)
    return Unavailable(
        f"the hub at {hub} cannot be reached for model {model!r}: {_words(error)}; check the network, "
        "proxies and HF_ENDPOINT, or give a folder"
    )


def _refused(error: HfHubHTTPError, model: str, hub: str) -> OutriderError:
    """The error for an answer whose status is not one of success."""
    status, said = error.response.status_code, error.response.headers.get("X-Error-Message", "")
    tail = f" ({said})" if said else ""
    if status == 401 and get_token():
        return Unauthenticated(
            f"{hub} refused the token that was sent for model {model!r}{tail}: set HF_TOKEN to a valid token "
            f"({hub}/settings/tokens), or unset it for a public model"
        )
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        return InvalidRequest(
            f"there is no model {model!r} at {hub}, or it is private: check the spelling; for a private "
            "model set HF_TOKEN, or run `hf auth login`"
        )
    if status == 403:
        return PermissionDenied(
            f"{hub} forbids model {model!r}{tail}: the token's account has no access; ask for access at "
            f"{hub}/{model.partition('@')[0]}, or set HF_TOKEN to another account's token"
        )
    return Unavailable(f"{hub} answered {status} for model {model!r}{tail}: try again later")


def _words(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
