"""The process that parses answers by response templates: one message after another, within bounds.

It is started with its end of a socket as standard input, and ends when the other end closes. It has none of
the parent's environment. A message that takes too much processor time or memory ends the process: the kernel
sees to that, since a pattern that searches cannot be interrupted from Python.
"""

import json
import os
import resource
import signal
import socket
from dataclasses import asdict
from typing import Any

from orchestrator.front.http.bodies.frames import LENGTH
from orchestrator.front.http.templated.template_parser import TemplateParser

MOST_S = 2
"""Whole seconds of processor time for a message."""
MEMORY_MIB = 1_024
"""Address space for answers, in MiB, beside what the libraries have."""
NICE = 5


def main() -> None:
    """Parses until the parent closes the socket."""
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the parent
    space = _address_space() + (MEMORY_MIB << 20)
    for what, most in ((resource.RLIMIT_AS, space), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (most, most))
    parsers: dict[int, TemplateParser] = {}
    with socket.socket(fileno=os.dup(0)) as connection, connection.makefile("rwb") as stream:
        while len(length := stream.read(LENGTH.size)) == LENGTH.size:
            message = json.loads(stream.read(LENGTH.unpack(length)[0]))
            if "text" not in message:
                parsers.pop(message["id"], None)
                continue
            _bound()
            data = json.dumps(_parsed(parsers, message)).encode()
            stream.write(LENGTH.pack(len(data)) + data)
            stream.flush()


def _address_space() -> int:
    """Bytes of the process's address space."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _bound() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = int(used.ru_utime + used.ru_stime) + 1 + MOST_S
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))


def _parsed(parsers: dict[int, TemplateParser], message: dict[str, Any]) -> dict[str, Any]:
    number = message["id"]
    try:
        if "order" in message:
            parsers[number] = TemplateParser(message["order"])
        parser = parsers[number]
        found = parser.feed(message["text"], last=message["last"])
    except Exception as error:
        parsers.pop(number, None)
        return {"failed": f"{type(error).__name__}: {error}"[:500]}
    if message["last"]:
        del parsers[number]
    return asdict(found) | {"held": parser.held}


if __name__ == "__main__":
    main()
