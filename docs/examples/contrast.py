"""Complete Python greedily, without and with contrast, and show that drafts change no id of either."""

import json
import subprocess
import sys
from contextlib import contextmanager

from outrider import Client


@contextmanager
def services():
    """`outrider up` with the embedded pair, whose drafter is also the amateur; gives the address."""
    command = [sys.executable, "-m", "outrider.cli", "up", "--json", "--amateur", "drafter"]
    command += ["--retrieval", "none", "--bind", "127.0.0.1:0", "--http-bind", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as up:
        try:
            yield json.loads(up.stdout.readline())["address"]
        finally:
            up.terminate()


def ask(address):
    with Client(address) as client:
        for strength in (0.0, 0.5):
            request = {"max_tokens": 96, "temperature": 0, "contrast_strength": strength, "timeout": 300}
            answer = client.generate("class Stack:\n", **request)
            plain = client.generate("class Stack:\n", **request, speculation=False)
            print(f"--- contrast_strength {strength}:", answer.text, sep="\n")
            print("ids equal to those without drafts:", answer.ids == plain.ids)


if __name__ == "__main__":
    if sys.argv[1:]:  # host:port of running services that have an amateur
        ask(sys.argv[1])
    else:
        with services() as address:
            ask(address)
