"""One lesson's child process as its parent sees it: started, paused, and ended in bounded time."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from outrider.learning.judge import Score
from outrider.learning.order import OUT_OF_MEMORY, LessonOrder
from outrider.learning.pace import LessonPace, Surroundings
from outrider.learning.passages import Passage, to_bytes

LOOK_S = 0.1
"""Seconds between two looks at the surroundings."""
_NO_MEMORY = ("bad_alloc", "Memory allocation still failed")
"""What C++ and OpenBLAS say when they end the process for lack of memory."""
_TICKS = os.sysconf("SC_CLK_TCK")


class LessonFailed(Exception):
    """A lesson gave no weights; `reason` is too_few, memory, killed, stopped, late or failed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class LessonResult:
    """What a child reported.

    Attributes:
        score: accepted places of all versions on the exam passages.
        losses: loss before and after training, in nats per place; empty where nothing was trained.
    """

    score: Score
    losses: list[float]


class LessonProcess:
    """A child that carries out one order.

    Args:
        child: module that the child runs; see `child_process`.
        late_s: seconds after which the child is ended, pauses included.
        pace: decides when the child runs.
        surroundings: looks at the machine; called with the id of the process whose work counts as idle.
    """

    def __init__(
        self,
        order: LessonOrder,
        lessons: Sequence[Passage],
        exams: Sequence[Passage],
        *,
        child: str,
        pace: LessonPace,
        surroundings: Callable[[int], Surroundings],
        late_s: float,
    ) -> None:
        self.order = order
        self.paused_s = 0.0
        """Seconds for which the child was paused."""
        self._exams = exams
        self._child = child
        self._pace = pace
        self._surroundings = surroundings
        self._late_s = late_s
        first = to_bytes(lessons)
        self._data = len(first).to_bytes(8, "little") + first + to_bytes(exams)
        self._stop = threading.Event()

    def stop(self) -> None:
        """Ends the child soon; from any thread."""
        self._stop.set()

    def run(self) -> LessonResult:
        """Runs the child to its end. Call it in a thread that outlives the child: the child ends with it.

        Raises LessonFailed.
        """
        command = [sys.executable, "-m", self._child]
        with subprocess.Popen(
            [*command, self.order.to_json(), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": str(self.order.cores), "CUDA_VISIBLE_DEVICES": ""},
        ) as child:
            talks = [
                threading.Thread(target=_feed, args=(child.stdin, self._data), daemon=True),
                _Reader(child.stdout),
                _Reader(child.stderr),
            ]
            for talk in talks:
                talk.start()
            try:
                why = self._watch(child)
            except BaseException:
                child.kill()  # it may be paused, and would be waited for without end
                raise
            self._pace.ended(time.monotonic())
            for talk in talks:
                talk.join()
        out, said = (talk.read for talk in talks if isinstance(talk, _Reader))
        if why is not None:
            raise LessonFailed(why, f"the lesson was ended: {why}")
        return self._result(child.returncode, out, said.decode(errors="replace").strip())

    def _watch(self, child: "subprocess.Popen[bytes]") -> str | None:
        """Pauses and continues the child until it ends; the reason where it had to be ended."""
        began = looked = time.monotonic()
        running = True
        while child.poll() is None:
            now = time.monotonic()
            if not running:
                self.paused_s += now - looked
            looked = now
            if self._stop.is_set() or now - began > self._late_s:
                child.kill()
                child.wait()
                return "stopped" if self._stop.is_set() else "late"
            wanted = self._pace.look(now, self._surroundings(child.pid))
            if wanted != running:
                child.send_signal(signal.SIGCONT if wanted else signal.SIGSTOP)
                running = wanted
            self._stop.wait(LOOK_S)
        return None

    def _result(self, status: int, out: bytes, said: str) -> LessonResult:
        if status == OUT_OF_MEMORY:
            raise LessonFailed("memory", f"{self.order.memory_mb} MiB are too little for a lesson: {said}")
        if status == -signal.SIGXCPU:
            raise LessonFailed("late", f"the lesson took more than {self.order.seconds} s of processor time")
        if any(words in said for words in _NO_MEMORY):
            raise LessonFailed("memory", f"{self.order.memory_mb} MiB are too little for a lesson")
        if status < 0:
            raise LessonFailed("killed", f"the lesson was ended by signal {-status}: {said[-300:]}")
        if status:
            raise LessonFailed("failed", said.splitlines()[-1] if said else f"status {status}")
        read = json.loads(out)
        accepted = {int(version): np.array(places) for version, places in read["accepted"].items()}
        score = Score(
            accepted,
            np.array([one.places for one in self._exams]),
            np.array([one.session for one in self._exams]),
            [one.tenant for one in self._exams],
        )
        return LessonResult(score, read["losses"])


class _Reader(threading.Thread):
    """Reads a pipe to its end."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        super().__init__(daemon=True)
        self._pipe = pipe
        self.read = b""

    def run(self) -> None:
        assert self._pipe is not None
        self.read = self._pipe.read()


def _feed(pipe: IO[bytes] | None, data: bytes) -> None:
    assert pipe is not None
    try:
        pipe.write(data)
        pipe.close()
    except BrokenPipeError:
        return  # the child has ended, and its status says why


class CoreMeter:
    """Measures how many cores of the machine are idle; work of one process counts as idle."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before: tuple[float, float, int] | None = None
        self._idle = float(len(os.sched_getaffinity(0)))

    def idle(self, pid: int) -> float:
        """Idle cores since the last call that measured, at least 0.2 s ago."""
        now = self._clock()
        if self._before is not None and now - self._before[0] < 0.2:
            return self._idle
        ticks = _idle_ticks() + _own_ticks(pid)
        if self._before is not None and self._before[2] == pid:
            self._idle = max(0.0, (ticks - self._before[1]) / _TICKS / (now - self._before[0]))
        self._before = now, ticks, pid
        return self._idle


def _idle_ticks() -> float:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return float(fields[4]) + float(fields[5])  # idle, and waiting for a disk


def _own_ticks(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # it has just ended
    return float(fields[11]) + float(fields[12])
