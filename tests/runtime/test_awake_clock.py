"""The clock by which proposers are judged leaves out what the whole process slept through, no more."""

import signal
import subprocess
import sys
import time

import pytest

from outrider.runtime.stalls.awake_clock import BEAT_S, AwakeClock


class Machine:
    """The time, and the processor time of one process, on a machine of the test's."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.processor_s = 7.0
        self.clock = AwakeClock(lambda: self.now_s, lambda: self.processor_s)
        self.clock.beat()

    def frozen(self, seconds: float) -> None:
        self.now_s += seconds

    def computing(self, seconds: float) -> None:
        """One thread computes and holds the interpreter, so that nothing beats."""
        self.now_s += seconds
        self.processor_s += seconds

    def waiting(self, seconds: float) -> None:
        """Nothing computes; the clock's thread goes on."""
        for _ in range(round(seconds / BEAT_S)):
            self.now_s += BEAT_S
            self.clock.beat()


@pytest.mark.parametrize("seconds", [0.05, 1.5, 30.0])
def test_computing_and_waiting_take_their_time(seconds: float) -> None:
    machine = Machine()
    began_s = machine.clock.awake_s()
    machine.computing(seconds)
    assert machine.clock.awake_s() - began_s == pytest.approx(seconds)
    machine.waiting(2.0)
    assert machine.clock.awake_s() - began_s == pytest.approx(seconds + 2.0)


@pytest.mark.parametrize("seconds", [0.5, 5.0, 8 * 3600.0])
def test_a_frozen_process_takes_no_more_than_a_beat(seconds: float) -> None:
    machine = Machine()
    began_s = machine.clock.awake_s()
    machine.frozen(seconds)
    assert machine.clock.awake_s() - began_s == pytest.approx(BEAT_S)
    machine.computing(0.2)
    machine.frozen(seconds)
    machine.clock.beat()
    assert machine.clock.awake_s() - began_s <= 0.2 + 2 * BEAT_S + 1e-9


def test_a_clock_that_nobody_started_gives_the_time() -> None:
    clock = AwakeClock(lambda: 5.0, lambda: 0.0)
    assert clock.awake_s() == 5.0


STOPPED = """
import sys, time
from outrider.runtime.stalls.awake_clock import AwakeClock
clock = AwakeClock()
clock.start()
began_s, awake_s = time.perf_counter(), clock.awake_s()
print("ready", flush=True)
sys.stdin.readline()
print(time.perf_counter() - began_s, clock.awake_s() - awake_s)
clock.stop()
"""


def test_a_stopped_process_is_not_held_to_have_taken_that_time() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    child.send_signal(signal.SIGCONT)
    passed_s, awake_s = map(float, child.communicate("go on\n")[0].split())
    assert passed_s > 1.4
    assert passed_s - awake_s > 1.0
