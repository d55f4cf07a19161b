"""Forgets what a tenant or a session brought: in what is loaded, and in files that this start left closed."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from outrider.folder_lock import FolderLock
from outrider.wire.codec import MAX_CHOICES, SessionKey
from retrieval_service.catalogue import scope, session_name
from retrieval_service.dense.manifest import forget_scope
from retrieval_service.loading import Loaded, past_limits
from retrieval_service.past.outputs import PastOutputs
from retrieval_service.settings import RetrievalSettings

FORGET_S = 60.0
"""Seconds for which forgetting waits for past outputs that are being written."""


class Forgetting:
    """Forgets what a tenant or a session brought, in loaded memories and on the disk. For any thread.

    The folder may hold past outputs and documents of an earlier start that this one did not load: it was
    started without them, or its embeddings server was away. They would come back with the next start.

    Methods raise OSError where a file could not be removed, and OutriderError for files that cannot be read.
    """

    def __init__(self, settings: RetrievalSettings) -> None:
        self._settings = settings
        self._alone = threading.Lock()
        """Held while files are open that no loaded memory has."""

    def tenant(self, loaded: Loaded, tenant: str) -> None:
        """Removes all past output and documents of a tenant: the documents even where past output fails."""
        try:
            with self._past(loaded) as past:
                if past is not None:
                    past.forget_tenant(scope(tenant), timeout=FORGET_S)
        finally:
            self._documents(loaded, tenant)

    def session(self, loaded: Loaded, tenant: str, session: str) -> None:
        """Removes the past output of all choices of a session."""
        choices = [session_name(SessionKey(tenant, session, choice)) for choice in range(MAX_CHOICES)]
        with self._past(loaded) as past:
            if past is not None:
                past.forget(scope(tenant), *choices, timeout=FORGET_S)

    @contextmanager
    def _past(self, loaded: Loaded) -> Iterator[PastOutputs | None]:
        """The past outputs that are loaded, else those of the folder, else None."""
        folder = self._settings.below("past")
        if loaded.past is not None or folder is None or not folder.is_dir():
            yield loaded.past
            return
        with self._alone, closing(PastOutputs(folder, past_limits(self._settings))) as past:
            yield past

    def _documents(self, loaded: Loaded, tenant: str) -> None:
        folder = self._settings.below("documents")
        if loaded.documents is not None:
            loaded.documents.remove(scope(tenant), ())
        elif folder is not None and folder.is_dir():
            with self._alone, closing(FolderLock(folder)):
                forget_scope(folder, scope(tenant))
