"""Checks, message by message, the rules that hold for every stream whatever happens."""

from collections import Counter
from collections.abc import Callable, Sequence

from benchmarks.simulation.orchestrator import EDGE_LIMITS
from benchmarks.simulation.toy import golden
from orchestrator.edge.account import Dropped
from outrider.v1 import generation_pb2
from outrider.wire.codec import finish_from_wire
from speculative.noise import derive
from speculative.stop import FinishReason

CANCELLED = FinishReason.CANCELLED


class RequestChecker:
    """Checks one request over all streams that its client needs for it.

    Args:
        name: the request's name in reports.
        prompt: the prompt's ids.
        seed: the seed of choice 0.
        most: the most tokens of a choice.
        violated: takes a sentence about a rule that does not hold.
        counts: counts of events by name, to which this adds.
        now: the loop's clock.
        silent_s: most seconds between two messages of a stream.
    """

    def __init__(
        self,
        name: str,
        prompt: Sequence[int],
        seed: int,
        n: int,
        most: int,
        violated: Callable[[str], None],
        counts: Counter[str],
        now: Callable[[], float],
        silent_s: float,
    ) -> None:
        self.name = name
        self.prompt = tuple(prompt)
        self.golden = [golden(self.prompt, derive(seed, choice), most) for choice in range(n)]
        self.ids: list[list[int]] = [[] for _ in range(n)]
        self.ended: dict[int, FinishReason] = {}
        self.epoch = 0
        self.may_be_cancelled = False
        """Whether the client or the deadline may have ended the request."""
        self.times_over = False
        """Whether more than one client sends this request."""
        self.is_claimed = False
        """Whether the client's device drafts for another session alone."""
        self._seed = seed
        self._violated = violated
        self._counts = counts
        self._had: list[int] = [0] * n
        self._started = False
        self._floor = 0
        self._now = now
        self._silent_s = silent_s
        self._heard_at = 0.0

    @property
    def has_all_ends(self) -> bool:
        """Whether the client has read the end of every choice."""
        return len(self.ended) == len(self.golden)

    def continues(self, other: "RequestChecker") -> None:
        """Takes over what the other checker's client has read so far."""
        self.ids = [list(ids) for ids in other.ids]
        self.ended = dict(other.ended)
        self.epoch = other.epoch

    def woke(self) -> None:
        """Records that the client has slept: until now no message was expected."""
        self._heard_at = self._now()

    def asked(self) -> None:
        """Records that the client opens a stream, the first one or one that resumes."""
        self._counts["streams"] += 1
        self._started = False
        self._heard_at = self._now()
        self._floor = self.epoch
        self._had = [len(ids) for ids in self.ids]

    def message(self, response: generation_pb2.GenerateResponse) -> None:
        """Checks the next message of the stream."""
        before, self._heard_at = self._heard_at, self._now()
        if self._heard_at - before > self._silent_s:
            self._wrong(f"nothing came for {self._heard_at - before:.1f} s")
        match response.WhichOneof("body"):
            case "started":
                self._start(response.started)
            case "tokens":
                self._tokens(response.tokens)
            case "finished":
                self._finish(response.finished)

    def check_answer(self) -> None:
        """Checks that the answer that the client has got is complete."""
        for choice, (ids, reason) in enumerate(self.golden):
            if self.ended.get(choice) is None:
                self._wrong(f"choice {choice} has no end")
            elif self.ended[choice] is not CANCELLED and tuple(self.ids[choice]) != ids:
                self._wrong(
                    f"choice {choice} ended ({reason}) after {len(self.ids[choice])} of {len(ids)} ids"
                )

    def _start(self, started: generation_pb2.GenerateStarted) -> None:
        if self._started:
            self._wrong("a stream began twice")
        self._started = True
        if started.epoch <= self._floor:
            self._wrong(f"epoch {started.epoch:016x} is not above {self._floor:016x}, which was seen")
        if started.seed != self._seed or started.prompt_tokens != len(self.prompt):
            self._wrong("another request began")
        self.epoch = max(self.epoch, started.epoch)

    def _tokens(self, tokens: generation_pb2.GeneratedTokens) -> None:
        choice, epoch = tokens.choice, tokens.epoch or self.epoch
        ids, (expected, _) = self.ids[choice], self.golden[choice]
        if not self._started:
            self._wrong("ids came before the start")
        if epoch < self.epoch:
            self._wrong(f"epoch {epoch:016x} gave ids after {self.epoch:016x} was seen")
        self.epoch = epoch
        place = tokens.position - len(self.prompt)
        if place != len(ids):
            what = "repeat" if place < len(ids) else "gap"
            self._wrong(f"choice {choice}: a {what}: {place} follows {len(ids)}")
        if choice in self.ended:
            self._wrong(f"choice {choice}: ids after its end")
        if len(tokens.token_sources) != len(tokens.ids):
            self._wrong(
                f"choice {choice}: {len(tokens.ids)} ids with {len(tokens.token_sources)} token_sources"
            )
        self._counts["ids"] += len(tokens.ids)
        ids.extend(tokens.ids)
        if tuple(ids) != expected[: len(ids)]:
            self._wrong(f"choice {choice}: other ids than golden, among the last {len(tokens.ids)}")

    def _finish(self, finished: generation_pb2.GenerateFinished) -> None:
        choice, reason = finished.choice, finish_from_wire(finished.reason)
        ids, (expected, right) = self.ids[choice], self.golden[choice]
        if reason is None or reason is FinishReason.ERROR:
            self._wrong(f"choice {choice}: ended in an error: {finished.message}")
            return
        if reason is CANCELLED and not self.may_be_cancelled:
            self._wrong(f"choice {choice}: cancelled by nobody ({finished.message!r}) after {len(ids)} ids")
        if reason is not CANCELLED and (reason is not right or tuple(ids) != expected):
            self._wrong(f"choice {choice}: ended with {reason} after {len(ids)} of {len(expected)} ids")
        if finished.seed != derive(self._seed, choice):
            self._wrong(f"choice {choice}: another seed")
        self._counts[f"ended: {reason}"] += 1
        self._counts["recoveries"] += finished.usage.recoveries
        self._counts["accepted"] += sum(finished.usage.accepted_by_source.values())
        fresh = len(ids) - self._had[choice]
        usage = finished.usage
        if usage.completion_tokens != fresh:
            self._wrong(f"choice {choice}: usage counts {usage.completion_tokens} ids of {fresh}")
        if usage.rounds > fresh or sum(usage.accepted_by_source.values()) > fresh:
            self._wrong(f"choice {choice}: {fresh} ids, but usage is {usage}")
        if self.ended.setdefault(choice, reason) is not reason:
            self._wrong(f"choice {choice}: ended with {self.ended[choice]}, and then with {reason}")
        if finished.HasField("device"):
            self._check_device(choice, finished.device, fresh)

    def _check_device(self, choice: int, device: generation_pb2.DeviceUsage, fresh: int) -> None:
        """Checks that all drafts of a device are counted, that they spent credits, and belong to its session.

        Args:
            fresh: ids of the choice that came on this stream, each of which earned the device credits.
        """
        credits, dropped = EDGE_LIMITS.credits, device.dropped
        if device.nodes != device.forwarded + sum(dropped.values()):
            self._wrong(f"choice {choice}: not all of the device's drafts are counted: {device}")
        spent = device.nodes - dropped[Dropped.CREDIT] - dropped[Dropped.MALFORMED]
        if spent > credits.first + credits.per_token * fresh:
            self._wrong(f"choice {choice}: {spent} drafts of a device that got {fresh} ids were taken")
        if self.is_claimed and device.forwarded:
            self._wrong(f"choice {choice}: {device.forwarded} drafts for another session were sent on")
        self._counts["device's nodes"] += device.nodes
        self._counts["device's nodes sent on"] += device.forwarded

    def _wrong(self, what: str) -> None:
        self._violated(f"{self.name}: {what}")
