"""`outrider demo`: completes held-out prompts with the embedded pair, and compares with plain decoding.

Prints completions with every token in the colour of its source, decodes each prompt plainly as well, and
compares tokens and speed. Without a terminal it prints plain text.
"""

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from outrider.cli.asking.colours import STYLES, print_from, print_legend
from outrider.cli.failures import CommandFailed
from outrider.cli.local.stack import Stack, check_installed
from outrider.cli.local.up import Stopped, stoppable
from outrider.cli.local.up_settings import EMBEDDED, StackOptions, embedded
from outrider.client import Chunk, Client, Completion
from outrider.client.options import Options
from outrider.json_lines import json_lines
from outrider.tokens import TokenTable
from outrider.wire.names import TARGET
from speculative.text import TextStream

PROMPTS = 8
TOKENS = 160
TEMPERATURES = (0.0, 0.8)
"""Temperatures of the prompts, used in turn."""
WARM_UP_TOKENS = 16
LEAST_TOKENS = 16
"""Tokens of an answer below which no speed is shown: its time would be mostly that of the prompt."""
PROMPT_LINES = 4
WIDTH = 156
TERMINATED = 143


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """A held-out prompt with its temperature and seed."""

    name: str
    text: str
    temperature: float
    seed: int

    def options(self, *, speculation: bool, tokens: int = TOKENS, learn: bool = True) -> Options:
        return Options(
            max_tokens=tokens,
            temperature=self.temperature,
            seed=self.seed,
            speculation=speculation,
            learn=learn,
        )


@dataclass(frozen=True, slots=True)
class TimedCompletion:
    """A completion and its seconds from the request to the last token."""

    completion: Completion
    seconds: float


def run_demo(passes: str) -> int:
    """Runs the demonstration; returns 0 if all completions equal plain decoding, else 1; 130 after Ctrl-C.

    `passes` is `eager` or `compiled`, as in `outrider up --passes`.
    """
    check_installed(retrieval=True)
    console = Console(highlight=False, width=None if Console().is_terminal else WIDTH)
    prompts = read_prompts(EMBEDDED / "heldout.jsonl")
    table = TokenTable.from_json((embedded("target") / "tokenizer.json").read_text(encoding="utf-8"))
    try:
        options = StackOptions(
            corpora=_corpora(table, console), passes=passes, bind="127.0.0.1:0", http_bind="127.0.0.1:0"
        )
        with stoppable(TERMINATED), closing(Stack(options)) as stack:
            _start(stack, console)
            with Client(stack.address) as client:
                speculative, plain = _decode_all(client, prompts, Painter(console, table), console)
    except Stopped as stopped:
        console.print("stopped")
        return stopped.status
    return report(prompts, plain, speculative, console)


def read_prompts(path: Path, count: int = PROMPTS) -> list[HeldOutPrompt]:
    """Reads `count` held-out prompts, spread over the file, each with its temperature and seed."""
    try:
        lines = [json.loads(line) for line in json_lines(path.read_text(encoding="utf-8"))]
    except FileNotFoundError as error:
        raise CommandFailed(f"there are no prompts at {path}: they come with a clone", "NOT_FOUND") from error
    chosen = lines[:: max(1, len(lines) // count)][:count]
    return [
        HeldOutPrompt(line["name"], line["prompt"], TEMPERATURES[place % len(TEMPERATURES)], seed=place + 1)
        for place, line in enumerate(chosen)
    ]


class Painter:
    """Prints tokens in the colour of their source, or plainly without a terminal."""

    def __init__(self, console: Console, table: TokenTable) -> None:
        self._console = console
        self._table = table

    def legend(self) -> None:
        """Prints the sources in their colours."""
        print_legend(self._console)

    def prompt(self, prompt: HeldOutPrompt, number: int, count: int) -> None:
        """Prints a heading and the prompt's last lines."""
        how = f"temperature {prompt.temperature:g}" if prompt.temperature else "greedy"
        self._console.print(f"\n[bold]{number}/{count} {prompt.name}, {how}[/bold]", soft_wrap=True)
        tail = prompt.text.splitlines(keepends=True)[-PROMPT_LINES:]
        self._console.out("".join(tail), style="dim", end="", highlight=False)

    def answer(self, chunks: Iterable[Chunk]) -> None:
        """Prints tokens as they arrive."""
        text = TextStream(self._table.token_bytes, ())
        for chunk in chunks:
            for id_, source in zip(chunk.ids, chunk.sources, strict=True):
                print_from(self._console, text.push((id_,)), source)
        print_from(self._console, text.finish() + "\n", TARGET)


def _corpora(table: TokenTable, console: Console) -> tuple[str, ...]:
    """Folder of the corpus to draft from; empty where it cannot be built, which costs only speed."""
    from outrider.cli.local.demo_corpus import demo_corpus
    from retrieval_service.corpus.errors import CorpusError

    began = time.perf_counter()
    try:
        folder = demo_corpus(table, EMBEDDED / "heldout.jsonl")
    except (CorpusError, OSError) as error:
        console.print(f"there is no corpus of installed packages to draft from: {error}", soft_wrap=True)
        return ()
    took = time.perf_counter() - began
    console.print(f"a corpus of installed packages' source is at {folder} ({took:.1f} s)", soft_wrap=True)
    return (str(folder),)


def _start(stack: Stack, console: Console) -> None:
    began = time.perf_counter()
    console.print("starting verifier, drafter, retrieval and orchestrator, each a process of its own ...")
    stack.start()
    for child in stack.wait_ready(lambda children: None):
        console.print(
            f"  {child.role} is ready on {child.address}, after {time.perf_counter() - began:.1f} s"
        )


def _decode_all(
    client: Client, prompts: Sequence[HeldOutPrompt], painter: Painter, console: Console
) -> tuple[list[TimedCompletion], list[TimedCompletion]]:
    """Completes every prompt with speculation, printing the answer, and then plainly.

    The verifier reads all prompts beforehand: else the first of two requests would read a prompt for both.
    """
    for speculation in (True, False):
        warming = prompts[0].options(speculation=speculation, tokens=WARM_UP_TOKENS, learn=False)
        client.generate(prompts[0].text, **warming)
    for prompt in prompts:
        client.generate(prompt.text, **prompt.options(speculation=False, tokens=1, learn=False))
    painter.legend()
    speculative, plain = [], []
    for number, prompt in enumerate(prompts, start=1):
        painter.prompt(prompt, number, len(prompts))
        speculative.append(_decode(client, prompt, painter, speculation=True))
        plain.append(_decode(client, prompt, None, speculation=False))
        console.print(f"  {speculative[-1].seconds:.1f} s; decoded plainly: {plain[-1].seconds:.1f} s")
    return speculative, plain


def _decode(
    client: Client, prompt: HeldOutPrompt, painter: Painter | None, *, speculation: bool
) -> TimedCompletion:
    began = time.perf_counter()
    stream = client.stream(prompt.text, **prompt.options(speculation=speculation))
    if painter is not None:
        painter.answer(stream)
    completion = stream.completion()
    return TimedCompletion(completion, time.perf_counter() - began)


def report(
    prompts: Sequence[HeldOutPrompt],
    plain: Sequence[TimedCompletion],
    speculative: Sequence[TimedCompletion],
    console: Console,
) -> int:
    """Prints the table and, as the last line, the verdict; returns the exit status."""
    table = Table()
    table.add_column("prompt", overflow="ellipsis", no_wrap=True)
    columns = ("decoding", "plain\ntokens/s", "speculative\ntokens/s", "speedup", "acceptance\nlength")
    sources = [source for source in STYLES if source != TARGET]
    for column in (*columns, *(f"accepted\nfrom {source}" for source in sources)):
        table.add_column(column, justify="right", no_wrap=True)
    for prompt, before, after in zip(prompts, plain, speculative, strict=True):
        how = f"T {prompt.temperature:g}" if prompt.temperature else "greedy"
        figures = _figures([before], [after], sources)
        if (count := len(after.completion.ids)) < LEAST_TOKENS:
            how += f", {count} token" + "s" * (count != 1)
            figures[:3] = ["-"] * 3
        table.add_row(prompt.name, how, *figures)
    table.add_section()
    table.add_row("total", "", *_figures(plain, speculative, sources))
    console.print(table)
    equal = sum(a.completion.ids == b.completion.ids for a, b in zip(plain, speculative, strict=True))
    console.print(f"ids equal to plain decoding: {equal} of {len(prompts)}")
    return 0 if equal == len(prompts) else 1


def _figures(
    plain: Sequence[TimedCompletion], speculative: Sequence[TimedCompletion], sources: Sequence[str]
) -> list[str]:
    """Cells of one row: speeds, speedup, acceptance length and shares, over all of these answers."""
    slow, fast = _rate(plain), _rate(speculative)
    usages = [answer.completion.usage for answer in speculative]
    tokens = sum(usage.completion_tokens for usage in usages)
    rounds = sum(usage.rounds for usage in usages)
    shares = [sum(usage.accepted_by_source.get(source, 0) for usage in usages) / tokens for source in sources]
    figures = [f"{slow:.0f}", f"{fast:.0f}", f"{fast / slow:.2f}x", f"{tokens / rounds:.2f}"]
    return figures + [f"{share:.0%}" for share in shares]


def _rate(answers: Sequence[TimedCompletion]) -> float:
    return sum(len(answer.completion.ids) for answer in answers) / sum(answer.seconds for answer in answers)
