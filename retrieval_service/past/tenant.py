"""One tenant's text behind a lock: fed and tidied in small steps, so that a lookup never waits long."""

import threading
from collections.abc import Callable, Sequence

from retrieval_service.past.tenant_files import TenantFiles
from retrieval_service.past.text import Added, Held, PastText
from retrieval_service.trie import CountedTrie, counted

STEP = 32
"""Ids taken in, or dropped, under the lock at once: some tenths of a millisecond."""


class Tenant:
    """A text, its files if it has any, and how both relate.

    `behind`: the files lack something the text has; nothing is appended until a snapshot brought them up to
    date. `gone`: forgotten; whoever still holds the object asks for a new one.
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
        """Take in at most STEP ids and have them written; False where the tenant is gone."""
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

    def finish(self, session: str) -> None:
        """As `PastText.finish`."""
        with self._lock:
            self.text.finish(session)

    def lookup(self, ids: Sequence[int], *, node_limit: int, depth: int) -> CountedTrie | None:
        """As `PastText.lookup`; the lock is held for finding only."""
        with self._lock:
            length, found = self.text.read(ids, depth)
        return counted(found, length, node_limit) if found else None

    def give_up_oldest(self) -> bool:
        """Begin to drop the oldest sequence for room elsewhere; False where there is none."""
        with self._lock:
            return self.text.give_up_oldest()

    def forget(self, sessions: Sequence[str]) -> int:
        """Drop sessions' text; the number of ids that were held."""
        with self._lock:
            count = sum(map(self.text.forget, sessions))
        self.settle()
        return count

    def leave(self) -> int:
        """Drop all text; returns the number of ids that were held."""
        with self._lock:
            self.gone = True
            count = self.text.tokens
            self.text = PastText(self.text.token_limit)
        return count

    def settle(self, steps: int | None = None) -> None:
        """Drop text that is due to go: all of it, or about as many ids as given."""
        done = 0
        while self.text.leaving and (steps is None or done < steps):
            with self._lock:
                self.text.tidy(STEP)
            done += STEP

    def copy(self) -> tuple[list[Held], int]:
        """The contents of a snapshot; records from here on are appended to the log behind it."""
        with self._lock:
            self.behind = False
            held, next_serial = self.text.held(), self.text.next_serial
        # Ids are only ever added: their number says what was there, and copying need not hold up lookups.
        return [(serial, session, ids[:size]) for serial, session, ids, size in held], next_serial
