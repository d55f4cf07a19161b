"""Runs `trial.py` on a grammar, and reports the fault that the trial finds."""

import json
import logging
import re
import signal
import subprocess
import sys
from pathlib import Path

from speculative.errors import Overloaded
from verifier_service.grammar.trial import CPU_S, MEMORY_MIB, OUT_OF_MEMORY

log = logging.getLogger(__name__)

WALL_S = 8.0
"""Seconds after which a trial is given up: the machine is too busy to give it its seconds of a core."""
_AT_ITS_BOUNDS = (OUT_OF_MEMORY, -signal.SIGXCPU, -signal.SIGABRT, -signal.SIGSEGV)
"""How a trial ends that needs too much. Without memory the library aborts."""
_MOST_SAID = 300
_NOTHING = "it allows no text at all"
_TOO_LARGE = (
    f"it takes more than {CPU_S} s or {MEMORY_MIB} MiB to compile, or is nested too deeply; make it smaller"
)


class Vetting:
    """Runs one trial at a time, each in a process of its own."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False

    def fault(self, grammar: str) -> str:
        """The fault of a grammar; empty for a grammar that may be compiled in this process. Blocks.

        Raises Overloaded where the machine is too busy for a trial, or ends it: that says nothing of the
        grammar.
        """
        # -P: nothing may be imported from the folder of the script.
        command = [sys.executable, "-P", str(Path(__file__).with_name("trial.py"))]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as child:
            self._child = child
            if self._closed:
                child.kill()
            try:
                said, _ = child.communicate(grammar.encode(), WALL_S)
            except subprocess.TimeoutExpired:
                child.kill()
                raise Overloaded("this verifier is too busy to compile a grammar", 1.0) from None
            finally:
                self._child = None
        if child.returncode in _AT_ITS_BOUNDS:
            return _TOO_LARGE
        if child.returncode:
            log.warning("the trial of a grammar ended with status %d", child.returncode)
            raise Overloaded("this verifier could not compile a grammar", 1.0)
        return readable(json.loads(said)["error"])

    def close(self) -> None:
        """Ends the running trial, and every later one at once."""
        self._closed = True
        if (child := self._child) is not None:
            child.kill()


def readable(error: str) -> str:
    """The library's error message on one line, without the text that it adds around the grammar."""
    if "NoExtension" in error:
        return _NOTHING
    error = error.partition("\n   1 | ")[0].partition("\n<non-verbose/>")[0].partition("<backtrace>")[0]
    error = re.sub(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", error)
    # The server adds the first line of every grammar.
    error = re.sub(r"^(\d+)\((\d+)\): ", lambda at: f"line {int(at[1]) - 1}, column {at[2]}: ", error)
    # Below a faulty regular expression, the library prints what is wrong with it.
    error = error.rpartition("\nerror: ")[2]
    error = " ".join(error.split())
    return error if len(error) <= _MOST_SAID else error[:_MOST_SAID] + "..."
