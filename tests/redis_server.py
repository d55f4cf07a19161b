"""A real Redis server on a unix socket, which a test can freeze, kill and start again."""

import contextlib
import signal
import socket
import subprocess
import time
from pathlib import Path

from benchmarks.shared.redis_process import redis_executable


class RedisServer:
    """One Redis process; its data is lost when it is killed."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "redis.sock"
        self.url = f"unix://{self._socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        arguments = ["--port", "0", "--unixsocket", str(self._socket), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [redis_executable(), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        ends = time.monotonic() + 100
        while not self._answers():
            assert self._process.poll() is None, "the Redis server did not start"
            assert time.monotonic() < ends, "the Redis server did not answer"
            time.sleep(0.01)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def say(self, *words: str | bytes) -> None:
        """Sends one command to the server, past the code under test."""
        with contextlib.closing(self._dialled()) as line:
            parts = [word.encode() if isinstance(word, str) else word for word in words]
            body = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
            line.sendall(b"*%d\r\n%s" % (len(parts), body))
            assert not line.recv(1 << 16).startswith(b"-")

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _dialled(self) -> socket.socket:
        line = socket.socket(socket.AF_UNIX)
        line.settimeout(60)
        try:
            line.connect(str(self._socket))
        except OSError:
            line.close()
            raise
        return line

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), contextlib.closing(self._dialled()) as line:
            line.sendall(b"PING\r\n")
            return line.recv(16).startswith(b"+PONG")
        return False
