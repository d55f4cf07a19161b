"""Parts of the demonstration: prompts, colours, verdict. The tests of the services run the whole."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from outrider.cli.failures import CommandFailed
from outrider.cli.local.demo import WIDTH, HeldOutPrompt, Painter, TimedCompletion, read_prompts, report
from outrider.client import Chunk, Completion
from outrider.client.completions import Usage
from outrider.tokens import TokenTable
from speculative.stop import FinishReason


def answer(
    ids: tuple[int, ...], *, rounds: int, seconds: float, accepted: dict[str, int] | None = None
) -> TimedCompletion:
    usage = Usage(
        prompt_tokens=3, completion_tokens=len(ids), rounds=rounds, accepted_by_source=accepted or {}
    )
    return TimedCompletion(
        Completion(ids, "", FinishReason.LENGTH, 1, "s", usage, ("target",) * len(ids)), seconds
    )


PROMPTS = [HeldOutPrompt("one.py", "x", 0.0, 1), HeldOutPrompt("two.py", "y", 0.8, 2)]
PLAIN = [answer((5,) * 100, rounds=100, seconds=1.0), answer((6,) * 100, rounds=100, seconds=1.0)]


def printed(plain: list[TimedCompletion], speculative: list[TimedCompletion]) -> tuple[int, str]:
    out = io.StringIO()
    status = report(PROMPTS, plain, speculative, Console(file=out, width=WIDTH, highlight=False))
    return status, out.getvalue()


def test_the_verdict_is_the_last_line_and_the_status() -> None:
    fast = [
        answer((5,) * 100, rounds=25, seconds=0.25, accepted={"drafter": 50, "lookup": 25}),
        answer((6,) * 100, rounds=50, seconds=0.75, accepted={"drafter": 50}),
    ]
    status, out = printed(PLAIN, fast)
    assert status == 0
    assert out.splitlines()[-1] == "ids equal to plain decoding: 2 of 2"
    total = next(line for line in out.splitlines() if "total" in line)
    for figure in ("100", "200", "2.00x", "2.67", "12%", "50%"):
        assert figure in total
    wrong = [fast[0], answer((7,) * 100, rounds=50, seconds=0.75)]
    status, out = printed(PLAIN, wrong)
    assert status == 1
    assert out.splitlines()[-1] == "ids equal to plain decoding: 1 of 2"


def test_an_answer_of_a_few_tokens_has_no_speed() -> None:
    plain = [PLAIN[0], answer((6,), rounds=1, seconds=0.02)]
    fast = [answer((5,) * 100, rounds=25, seconds=0.25), answer((6,), rounds=1, seconds=0.08)]
    status, out = printed(plain, fast)
    assert status == 0
    assert "4.00x" in out
    (short,) = [line for line in out.splitlines() if "T 0.8, 1 token " in line]
    assert "x" not in short
    assert short.count(" - ") == 3


def test_prompts_are_greedy_and_sampled_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "heldout.jsonl"
    path.write_text("".join(json.dumps({"name": f"{n}.py", "prompt": f"text {n}"}) + "\n" for n in range(24)))
    prompts = read_prompts(path)
    assert [prompt.temperature for prompt in prompts] == [0.0, 0.8] * 4
    assert len({prompt.name for prompt in prompts}) == 8
    with pytest.raises(CommandFailed, match="clone"):
        read_prompts(tmp_path / "nothing.jsonl")


@pytest.fixture
def table() -> TokenTable:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 2, "Ċ": 3}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return TokenTable.from_json(tokenizer.to_str())


CHUNKS = [Chunk((0,), "a", ("target",)), Chunk((1, 2, 3), "bc\n", ("lookup", "drafter", "target"))]


def test_tokens_are_plain_text_without_colours(table: TokenTable) -> None:
    out = io.StringIO()
    Painter(Console(file=out), table).answer(CHUNKS)
    assert out.getvalue() == "abc\n\n"


def test_tokens_have_their_sources_colours_on_a_terminal(
    table: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = io.StringIO()
    painter = Painter(Console(file=out, force_terminal=True, color_system="standard"), table)
    painter.answer(CHUNKS)
    assert "\x1b[1;32mb\x1b[0m\x1b[1;36mc\x1b[0m" in out.getvalue()


def test_no_color_is_honoured(table: TokenTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    Painter(Console(file=out, force_terminal=True, color_system="standard"), table).answer(CHUNKS)
    assert "\x1b[1;32m" not in out.getvalue()
    assert "\x1b[3" not in out.getvalue()
