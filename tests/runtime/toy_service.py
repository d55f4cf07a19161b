"""A service for tests of the runtime: it lists one model, and fails or waits as its settings say."""

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import grpc.aio

from outrider.runtime.serve import Service, ServiceContext, run
from outrider.runtime.settings import ServiceSettings, settings_or_exit
from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire.status import guarded
from speculative.errors import InvalidRequest, ModelRefused, Overloaded, StaleEpoch


class ToySettings(ServiceSettings):
    role: ClassVar[str] = "drafter"

    load_s: float = 0.0
    block_s: float = 0.0
    fault: str = ""
    children: bool = False
    tensors: int = 0
    late_signal: int = 0
    """The number of a signal that the process gets as it ends; 0: none."""


FAULTS = {
    "refused": ModelRefused("the model type mamba is not served", "mamba"),
    "bug": RuntimeError("a bug"),
}
ERRORS = {
    "invalid": InvalidRequest("top_p is 1.5"),
    "stale": StaleEpoch("epoch 3 is older than 7", highest=7),
    "full": Overloaded("no room", retry_after_s=1.5),
    "bug": RuntimeError("secret detail"),
    "long": InvalidRequest("x" * 100_000),
}


def hold_the_loop(seconds: float) -> None:
    """Computes for so long without letting anything else run."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        sum(range(1000))


class LateSignal(logging.Handler):
    """Sends its own process a signal as logging is shut down, the last thing that a service does."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def close(self) -> None:
        super().close()
        if self._number:
            os.kill(os.getpid(), self._number)


HANDLERS: list[logging.Handler] = []
"""Kept here, since logging keeps no handler."""


class Toy(generation_pb2_grpc.GenerationServicer):
    def __init__(self, context: ServiceContext[ToySettings]) -> None:
        self._context = context
        self._calls = context.metrics.counter("calls", "Calls answered")
        self._stopping = asyncio.Event()

    def register(self, server: grpc.aio.Server) -> tuple[str, ...]:
        generation_pb2_grpc.add_GenerationServicer_to_server(self, server)
        return ("outrider.v1.Generation",)

    async def start(self) -> None:
        settings = self._context.settings
        for loaded in range(settings.tensors):
            self._context.loaded(loaded + 1, settings.tensors)
        print("printed by a library")
        os.write(1, b"written by a library\n")
        if settings.fault in FAULTS:
            raise FAULTS[settings.fault]
        await asyncio.sleep(settings.load_s)
        await asyncio.to_thread(time.sleep, settings.block_s)

    async def stop(self, grace: float) -> None:
        self._stopping.set()

    @guarded
    async def ListModels(self, request: Any, context: Any) -> generation_pb2.ListModelsResponse:
        self._calls.inc()
        return generation_pb2.ListModelsResponse(models=[generation_pb2.Model(name="toy")])

    @guarded
    async def Cancel(self, request: Any, context: Any) -> generation_pb2.CancelResponse:
        if request.session == "fail":
            self._context.fail(RuntimeError("the engine died"))
        if request.session == "stall":
            hold_the_loop(0.4)
        if request.session == "frozen":
            return generation_pb2.CancelResponse(found=gc.get_freeze_count() > len(sys.modules))
        if request.session in ERRORS:
            raise ERRORS[request.session]
        return generation_pb2.CancelResponse(found=True)

    @guarded
    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        """Answers each message; a session of "hold" waits until the service stops, others end in errors."""
        async for request in request_iterator:
            name = request.start.session
            yield generation_pb2.GenerateResponse(started=generation_pb2.GenerateStarted(session=name))
            if name in ERRORS:
                raise ERRORS[name]
            if name == "hold":
                await self._stopping.wait()


async def build(context: ServiceContext[ToySettings]) -> Service:
    return Toy(context)


def main(arguments: list[str]) -> None:
    settings = settings_or_exit(ToySettings, arguments)
    HANDLERS.append(LateSignal(settings.late_signal))
    run(settings.role, build, settings)


if __name__ == "__main__":
    main(sys.argv[1:])
