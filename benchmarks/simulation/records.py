"""Checks that the store's record of a session begins like the golden output of a request of that session."""

from collections.abc import Callable, Sequence

from benchmarks.simulation.conversations import Conversation
from benchmarks.simulation.plan import Plan
from orchestrator.store import Append
from orchestrator.store.memory import MemoryStore


def check_records(
    plan: Plan,
    conversations: Sequence[Conversation],
    memory: MemoryStore,
    appends: Sequence[Append],
    violated: Callable[[str], None],
) -> None:
    """Reports every record among `appends` that matches no request of its session."""
    known = {conversation.name: conversation for conversation in conversations}
    for it in appends:
        conversation = known.get(it.key.session)
        entry = memory._tokens.get(it.key)
        if conversation is None or entry is None:
            continue
        _, ids = entry
        right = conversation.golden.get(it.key.choice, [])
        if not any(tuple(ids) == golden[: len(ids)] for golden in right):
            violated(f"{it.key.session}: the record of choice {it.key.choice} is of no request: {ids}")
