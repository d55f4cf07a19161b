"""One tenant's text behind a lock: fed and tidied in small steps, so that a lookup never waits long."""

import threading
from array import array
from collections.abc import Callable, Sequence

from retrieval_service.past.compiled_index import IndexLibrary
from retrieval_service.past.tenant_files import TenantFiles
from retrieval_service.past.text import Added, Held, PastText
from retrieval_service.trie import CountedTrie, counted

STEP = 32
"""Ids taken in, or dropped, under the lock at once: some tenths of a millisecond."""


class Tenant:
    """A tenant's text, its files if it has any, and whether the files are up to date.

    `behind`: the files lack a part of the text; nothing is appended until a snapshot has brought them up to
    date. `gone`: the tenant was forgotten; a caller that still holds this object asks for a new one.
    """

    def __init__(self, name: str, text: PastText, files: TenantFiles | None) -> None:
        self.name = name
        self.text = text
        self.files = files
        self.gone = False
        # The first snapshot makes the files that records are appended to.
        self.behind = files is not None and not files.generation
        self.skipped_records = 0
        self._lock = threading.Lock()

    def extend(self, session: str, ids: Sequence[int], write: Callable[["Tenant", Added], bool]) -> bool:
        """Add at most STEP ids of a session and queue them to be written; False where the tenant is gone."""
        with self._lock:
            if self.gone:
                return False
            added = self.text.extend(session, ids)
            # Twice the ids that came in, so that due work never piles up.
            self.text.tidy(2 * STEP)
            if added is not None and self.files is not None and (self.behind or not write(self, added)):
                self.behind = True
                self.skipped_records += 1
            return True

    def use(self, library: IndexLibrary) -> None:
        """Go on with a compiled index; see `PastText.use`."""
        with self._lock:
            self.text.use(library)

    def finish(self, session: str) -> None:
        """End a session's sequence; see `PastText.finish`."""
        with self._lock:
            self.text.finish(session)

    def lookup(self, ids: Sequence[int], *, node_limit: int, depth: int) -> CountedTrie | None:
        """Look a context up in the text; see `Memory`. Holds the lock only while it searches."""
        with self._lock:
            length, found = self.text.read(ids, depth)
        return counted(found, length, node_limit) if found else None

    def give_up_oldest(self) -> bool:
        """Begin to drop the oldest sequence, to make room for another tenant; False where there is none."""
        with self._lock:
            return self.text.give_up_oldest()

    def forget(self, sessions: Sequence[str]) -> int:
        """Drop the text of these sessions; returns the number of ids dropped."""
        with self._lock:
            count = sum(map(self.text.forget, sessions))
        self.settle()
        return count

    def leave(self) -> int:
        """Drop all text and mark the tenant as gone; returns the number of ids dropped."""
        with self._lock:
            self.gone = True
            count = self.text.tokens
            self.text = PastText(self.text.token_limit)
        return count

    def settle(self, steps: int | None = None) -> None:
        """Drop text that is to be dropped: all of it, or about `steps` ids."""
        done = 0
        while self.text.leaving and (steps is None or done < steps):
            with self._lock:
                self.text.tidy(STEP)
            done += STEP

    def outputs(self) -> list[tuple[str, "array[int]"]]:
        """Session and ids of each kept sequence, oldest first."""
        with self._lock:
            held = self.text.held()
        return [(session, ids[:size]) for _, session, ids, size in held]

    def copy(self) -> tuple[list[Held], int]:
        """Sequences and next serial for a snapshot; from now on records are appended to the log behind it."""
        with self._lock:
            self.behind = False
            held, next_serial = self.text.held(), self.text.next_serial
        # Ids are only ever added: their number says what was there, and copying need not hold up lookups.
        return [(serial, session, ids[:size]) for serial, session, ids, size in held], next_serial
