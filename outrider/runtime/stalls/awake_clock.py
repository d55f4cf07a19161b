"""Time without the gaps in which the whole process stood still: stopped, frozen, or moved with its machine.

A call that merely waits, or that computes, takes its time: the clock's own thread goes on beside the one, and
the other uses a processor. Where neither is so, nothing of the process ran.
"""

import threading
import time
from collections.abc import Callable

BEAT_S = 0.1
"""Seconds between two beats of the clock's thread."""
LATE_S = 0.3
"""Seconds without a beat after which the clock asks whether the process ran at all."""
LEAST_SHARE = 0.5
"""Processor time of all threads in a gap, as a share of it, from which on the process ran: a thread that held
the interpreter worked all the time, and threads that were stopped had worked for a beat before."""


class AwakeClock:
    """Seconds while this process runs; correct from `start` to `stop`, else simply the time.

    Args:
        now_s: the time, in seconds.
        processor_s: processor time of all threads of the process, in seconds.
    """

    def __init__(
        self,
        now_s: Callable[[], float] = time.perf_counter,
        processor_s: Callable[[], float] = time.process_time,
    ) -> None:
        self._now_s = now_s
        self._processor_s = processor_s
        self._stood_s = 0.0
        self._beat: tuple[float, float] | None = None
        """The time and the processor time of the last beat; None: nothing beats."""
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="awake clock", daemon=True)

    def start(self) -> None:
        """Starts the thread that beats."""
        self.beat()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, if it was started."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def awake_s(self) -> float:
        """Seconds for which the process ran, from some moment on; for any thread."""
        beat = self._beat
        if beat is not None and self._now_s() - beat[0] > LATE_S:
            self.beat()  # the clock's thread may come only later
        return self._now_s() - self._stood_s

    def beat(self) -> None:
        """Notes that the process runs, and leaves out the time before in which it did not."""
        with self._lock:
            now_s, processor_s = self._now_s(), self._processor_s()
            if self._beat is not None:
                gap_s, worked_s = now_s - self._beat[0], processor_s - self._beat[1]
                if gap_s > LATE_S and worked_s < LEAST_SHARE * gap_s:
                    self._stood_s += gap_s - BEAT_S
            self._beat = now_s, processor_s

    def _run(self) -> None:
        while not self._stopping.wait(BEAT_S):
            self.beat()
