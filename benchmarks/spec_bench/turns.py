"""What one arm answers to a question, turn by turn, and how prompts of later turns are made."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.shared.questions import Question
from outrider.client import Client
from outrider.wire.names import TARGET

Template = Callable[[Sequence[str], Sequence[str]], str]
"""The prompt of the next turn, from the turns asked so far and the answers to all but the last of them."""
TEMPLATES = ("plain", "vicuna", "chat")
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


def template_of(name: str, target: str) -> Template:
    """How conversations become prompts.

    Args:
        name: `plain` joins turns and answers as they are, for models that continue text; `vicuna` is the
            template that Spec-Bench gives to every model; `chat` is the target's own.
        target: the target, whose tokenizer has the chat template.
    """
    if name == "vicuna":
        return vicuna
    if name == "chat":
        return _chat(target)
    return plain


def plain(turns: Sequence[str], answers: Sequence[str]) -> str:
    """Turns and answers in their order, nothing between them."""
    return "".join(turn + answer for turn, answer in zip(turns, (*answers, ""), strict=True))


def vicuna(turns: Sequence[str], answers: Sequence[str]) -> str:
    """FastChat's template of Vicuna 1.1 and later."""
    said = [f" USER: {turn} ASSISTANT: {answer}</s>" for turn, answer in zip(turns, answers, strict=False)]
    return f"{_VICUNA}{''.join(said)} USER: {turns[-1]} ASSISTANT:".replace("</s> USER", "</s>USER")


def _chat(target: str) -> Template:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    if tokenizer.chat_template is None:
        raise SystemExit(f"{target} has no chat template; choose --template plain or vicuna")

    def prompt(turns: Sequence[str], answers: Sequence[str]) -> str:
        messages = []
        for turn, answer in zip(turns, (*answers, None), strict=True):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert isinstance(text, str), "no ids were asked for"
        return text

    return prompt


def accept_lengths(sources: Sequence[str]) -> list[int]:
    """Accepted drafts + 1 of every step, as Spec-Bench counts them.

    Every step ends with a token of the target's own. A last step that a limit or an end of sequence cut
    inside its accepted drafts has no such token among those delivered; Spec-Bench counts that token, too.

    Args:
        sources: per delivered token, the name of the source that drafted it, or "target".
    """
    lengths, run = [], 0
    for source in sources:
        run += 1
        if source == TARGET:
            lengths.append(run)
            run = 0
    return [*lengths, run + 1] if run else lengths


class TurnAsker:
    """Asks the turns of questions of running services.

    Args:
        client: a client of the services' orchestrator.
        template: how conversations become prompts.
        tokens: the most tokens of an answer.
        temperature: 0 is greedy.
        edit: whether the prompt's last document is a reference of each request.
    """

    def __init__(
        self, client: Client, template: Template, tokens: int, temperature: float, *, edit: bool = False
    ) -> None:
        self._client, self._template = client, template
        self._tokens, self._temperature, self._edit = tokens, temperature, edit

    def answer(self, question: Question, sources: Sequence[str], seed: int) -> list[dict[str, Any]]:
        """The answers to all turns, each with ids, text, seconds, rounds and accept lengths.

        The time of a turn is Spec-Bench's: the whole call, prefill included, without text processing that
        Spec-Bench does outside; here the orchestrator's tokenizer is inside.

        Args:
            sources: names of the sources that draft; none: plain decoding.
        """
        answers: list[dict[str, Any]] = []
        for number in range(1, len(question.turns) + 1):
            texts = [answer["text"] for answer in answers]
            prompt = self._template(question.turns[:number], texts)
            began = time.perf_counter()
            done = self._client.generate(
                prompt,
                max_tokens=self._tokens,
                temperature=self._temperature,
                seed=seed,
                speculation=bool(sources),
                sources=list(sources) or None,
                edit=self._edit,
                learn=False,
            )
            answers.append(
                {
                    "ids": list(done.ids),
                    "text": done.text,
                    "seconds": time.perf_counter() - began,
                    "rounds": done.usage.rounds,
                    "accept_lengths": accept_lengths(done.sources),
                    "accepted": dict(done.usage.accepted_by_source),
                }
            )
        return answers
