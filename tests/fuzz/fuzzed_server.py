"""An orchestrator with both fronts before a fake verifier, as a process that tests send hostile inputs to.

Run as `python -m tests.fuzz.fuzzed_server FOLDER`: writes keys of TENANTS into FOLDER, prints one JSON object
with addresses and keys, and ends with its standard input.
"""

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outrider.client import AsyncClient
from outrider.runtime.serve import loop_factory
from outrider.tokens import TokenTable
from tests.orchestrator.conftest import FakeVerifier, Session, World
from tests.orchestrator.fronts import orchestrator, soon, write_keys

ROOT = Path(__file__).resolve().parents[2]
TENANTS = ("canary", "attacker")
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CONTEXT, VOCABULARY = 2048, 4096
MOST_SESSIONS = 512
CANARY_PER_TICK, PER_TICK = 8, 256
"""Tokens that a session of the canary's tenant gets at a time, and other sessions: their inputs are many."""


def id_at(prompt: Sequence[int], position: int) -> int:
    """The id that the fake target chooses at a position, which depends on the prompt."""
    return 2 + (sum(prompt) * 31 + position * 7) % (VOCABULARY - 96)


class PromptVerifier(FakeVerifier):
    """A fake verifier with the embedded target's tokenizer, whose ids depend on the prompt."""

    async def Describe(self, request: Any, context: Any) -> Any:
        """Describes a target of the embedded target's size."""
        described = await super().Describe(request, context)
        described.max_length, described.vocabulary_size, described.max_sessions = CONTEXT, VOCABULARY, 512
        return described

    async def Open(self, request: Any, context: Any) -> Any:
        """Opens a session, and forgets the oldest ended ones: a million inputs would fill the memory."""
        answer = await super().Open(request, context)
        for record in (self.opened, self.changed, self.metadata, self.cancelled):
            record.clear()
        if len(self.sessions) > MOST_SESSIONS:
            ended = [key for key, session in self.sessions.items() if session.finished is not None]
            for key in ended[: MOST_SESSIONS // 2]:
                del self.sessions[key]
        return answer

    def id_at(self, session: Session, position: int) -> int:
        """The id that the target chooses for a session at a position."""
        message = session.message
        return id_at(message.ids[: message.prompt_length], position)

    def _decode(self, session: Session) -> None:
        self.per_tick = CANARY_PER_TICK if session.message.key.tenant == TENANTS[0] else PER_TICK
        super()._decode(session)


async def serve(folder: Path) -> None:
    """Serves until standard input ends."""
    keys = write_keys(folder / "keys", TENANTS)
    tokens = TokenTable.from_json((ROOT / "models/target/tokenizer.json").read_text())
    async with AsyncExitStack() as stack:
        verifier = PromptVerifier(tokens=tokens, chat=CHAT, tick_s=0.01)
        await World(stack).serve(verifier)
        settings = {"verifier": (verifier.address,), "api_keys_file": folder / "keys", "log_level": "warning"}
        announced = await stack.enter_async_context(orchestrator(**settings))
        async with AsyncClient(announced["address"], api_key=keys[0]) as client:
            await soon(client.models)  # the verifier is reached a moment later
        print(json.dumps({**announced, "keys": dict(zip(TENANTS, keys, strict=True))}), flush=True)
        await asyncio.to_thread(sys.stdin.read)


class FuzzedServer:
    """The process; a context manager that ends it."""

    def __init__(self, folder: Path) -> None:
        """Starts the process and returns once it serves."""
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.fuzzed_server", str(folder)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.log()
        ready = json.loads(line)
        self.address: str = ready["address"]
        self.http: str = ready["http"].removeprefix("http://")
        self.keys: dict[str, str] = ready["keys"]
        self._metrics: str = ready["metrics"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    @property
    def runs(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def log(self, since: int = 0) -> str:
        """All that the process has written to standard error after its first `since` bytes."""
        with self._log.open("rb") as log:
            log.seek(since)
            return log.read().decode(errors="replace")

    def log_bytes(self) -> int:
        """Number of bytes that the process has written to standard error."""
        return self._log.stat().st_size

    def loop_seconds(self) -> float:
        """Processor time of the thread that runs the event loop, in seconds."""
        ran_ns = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/schedstat").read_text().split()[0]
        return int(ran_ns) / 1e9

    def resident_bytes(self) -> int:
        """Bytes of the process that are in RAM."""
        fields = Path(f"/proc/{self._process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def stalls(self) -> list[dict[str, Any]]:
        """The recent stalls of its event loop."""
        with urllib.request.urlopen(f"http://{self._metrics}/stalls", timeout=60) as reply:
            found: list[dict[str, Any]] = json.loads(reply.read())
            return found


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(Path(sys.argv[1])))
