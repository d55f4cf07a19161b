"""Stage ragged: the cost of passes that are no static steps, and whether steps with a prompt are static."""

import time
from functools import cached_property
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_first.machine import Machine
from benchmarks.gpu_first.report import Part, Results
from benchmarks.shared.random_llama import prefilled, static_steps
from outrider.lm.graphs.backend_choice import use_ragged
from outrider.lm.plan import PassPlan, SequenceRows
from outrider.lm.runner import PackedLM

LENGTHS = range(1001, 1041)
PROMPT = 8192
CHUNKS = (256, 512, 2048)
DECODERS = 32


def parts(machine: Machine) -> dict[str, Part]:
    """The parts of the stage by name."""
    stage = Ragged(machine)
    return {
        "sdpa": lambda: sdpa(machine),
        "one_row": stage.one_row,
        "prompt": stage.prompt,
        "beside_a_prompt": stage.beside_a_prompt,
    }


def sdpa(machine: Machine) -> Results:
    """First and second call of torch's attention at key lengths that are new: whether plans are built."""
    size = machine.eight
    for cudnn in (False, True):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        for rows in (1, 17):
            first: list[float] = []
            second: list[float] = []
            for length in LENGTHS[:3] if machine.tiny else LENGTHS:
                keys = torch.randn(1, size.key_heads, length, size.head_width, device=machine.name)
                keys = keys.to(machine.dtype)
                query = torch.randn(1, size.heads, rows, size.head_width, device=machine.name)
                mask = None if rows == 1 else torch.zeros(rows, length, device=machine.name)
                given = (
                    query.to(machine.dtype),
                    keys,
                    keys,
                    None if mask is None else mask.to(machine.dtype),
                )
                for times in (first, second):
                    machine.device.settle()
                    began = time.perf_counter()
                    scaled_dot_product_attention(*given, enable_gqa=True)
                    machine.device.settle()
                    times.append((time.perf_counter() - began) * 1e3)
            # The very first call of all also loads libraries.
            fields = {"first_ms": round(median(first[1:]), 4), "second_ms": round(median(second[1:]), 4)}
            ratio = round(fields["first_ms"] / max(fields["second_ms"], 1e-6), 2)
            yield f"sdpa_cudnn_{cudnn}_rows_{rows}", fields | {"first_over_second": ratio}
    torch.backends.cuda.enable_cudnn_sdp(False)


class Ragged:
    """Parts that share one 8B-shaped model."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._length = 64 if machine.tiny else PROMPT
        self._context = 32 if machine.tiny else 1024

    @cached_property
    def _lm(self) -> PackedLM:
        sessions = self._context + 256
        tokens = 3 * self._length + (DECODERS + 1) * sessions
        return self._machine.model(self._machine.eight, tokens)

    def one_row(self) -> Results:
        """A step of one row, ragged and static."""
        lm, machine = self._lm, self._machine
        table = prefilled(lm, [1] * self._context)

        def once() -> None:
            lm.forward([SequenceRows(table, [1], [-1], [0])])
            table.drop_nodes()

        use_ragged(lm)
        ragged_ms = machine.device.ms(once, machine.repeats)
        static_steps(lm, machine.device)
        static_ms = machine.device.ms(once, machine.repeats)
        lm.release(table)
        yield "one_row", {"ragged_ms": round(ragged_ms, 3), "static_ms": round(static_ms, 3)}

    def prompt(self) -> Results:
        """A long prompt in chunks of several sizes; the second run is timed, once captures are made."""
        lm = self._lm
        static_steps(lm, self._machine.device)
        for chunk in (16, 32) if self._machine.tiny else CHUNKS:
            seconds = 0.0
            for _ in range(2):
                self._machine.device.settle()
                began = time.perf_counter()
                table = prefilled(lm, [1] * self._length, chunk)
                self._machine.device.settle()
                seconds = time.perf_counter() - began
                lm.release(table)
            yield (
                f"prompt_by_{chunk}",
                {
                    "seconds": round(seconds, 3),
                    "tokens_per_s": round(self._length / seconds),
                    "static": self._is_static([chunk]),
                },
            )

    def beside_a_prompt(self) -> Results:
        """A step of 32 decoding sessions, alone and with a chunk of 512 rows of a prompt."""
        lm, machine = self._lm, self._machine
        static_steps(lm, machine.device)
        decoders = 2 if machine.tiny else DECODERS
        chunk = 16 if machine.tiny else 512
        tables = [prefilled(lm, [1] * self._context) for _ in range(decoders)]
        reading = lm.table()
        decoding = [SequenceRows(table, [1], [-1], [0]) for table in tables]
        chunked = SequenceRows(reading, [1] * chunk, range(-1, chunk - 1), ())
        ms = []
        for given in (decoding, [*decoding, chunked]):

            def once(given: list[SequenceRows] = given) -> None:
                lm.forward(given)
                for each in given:
                    each.table.drop_nodes()

            ms.append(round(machine.device.ms(once, machine.repeats), 3))
        yield (
            "beside_a_prompt",
            {
                "alone_ms": ms[0],
                "ms": ms[1],
                "static": self._is_static([*[1] * decoders, chunk]),
            },
        )
        for table in (*tables, reading):
            lm.release(table)

    def _is_static(self, rows: list[int]) -> bool:
        """Whether a pass of sessions with these chains runs as a static step."""
        lm = self._lm
        assert lm.steps is not None
        tables = [lm.table() for _ in rows]
        chains = [
            SequenceRows(table, [1] * count, range(-1, count - 1), ())
            for table, count in zip(tables, rows, strict=True)
        ]
        fits = lm.steps.fits(PassPlan(chains, lm.pool, lm.model.dtype))
        for table in tables:
            lm.release(table)
        return fits
