"""The name of the gRPC status behind an error; apart from the rest because it imports gRPC."""

import grpc

from outrider.runtime.children import ServiceFailed
from outrider.wire.status import status_of
from speculative.errors import OutriderError


def status_name(error: OutriderError) -> str:
    """As the peer said it, where a peer did; else as this error would be said to one."""
    if isinstance(error, ServiceFailed):
        return error.code
    cause = error.__cause__
    code = cause.code() if isinstance(cause, grpc.Call) else status_of(error).code
    return str(code.name)
