"""Details of a failed call in google.rpc's messages, which libraries of all languages read."""

from collections.abc import Mapping

from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

DETAILS_KEY = "grpc-status-details-bin"
"""Key of the trailing metadata under which all languages' libraries look for the details."""
DOMAIN = "outrider"
MOST_BYTES = 2_048
"""The most bytes of the details: the message is in them again, and headers hold some 8 KB."""


def error_details(
    code: int, message: str, name: str, retry_after_s: float | None = None, facts: Mapping[str, str] = {}
) -> bytes:
    """A google.rpc.Status as bytes; empty where the details would take too much of the headers.

    Args:
        code: number of the gRPC status code.
        message: the status's message.
        name: the error's name, the reason of the ErrorInfo.
        retry_after_s: seconds until a retry may succeed, as a RetryInfo; None: the error names none.
        facts: metadata of the ErrorInfo.
    """
    status = Status(code=code, message=message)
    _pack(status, ErrorInfo(reason=name, domain=DOMAIN, metadata=facts))
    if retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(retry_after_s * 1e9))
        _pack(status, RetryInfo(retry_delay=delay))
    data = status.SerializeToString()
    return data if len(data) <= MOST_BYTES else b""


def _pack(status: Status, detail: ErrorInfo | RetryInfo) -> None:
    packed = Any()
    packed.Pack(detail)
    status.details.append(packed)
