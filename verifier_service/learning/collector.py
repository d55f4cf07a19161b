"""Makes passages of what sessions committed; keeps only text that the owner may keep."""

import numpy as np

from outrider.learning.cuts import cuts, is_exam, session_number
from outrider.learning.owner import LearnOwner
from outrider.learning.passages import Passage, PassageBuffer
from verifier_service.sessions.table import SessionView


class TextCollector:
    """Collects passages of the sessions that the owner may learn from; lives on the event loop.

    Ids are all that is kept: a lesson works out what the target says of them.
    """

    def __init__(self, owner: LearnOwner, buffer: PassageBuffer) -> None:
        self._owner = owner
        self._buffer = buffer

    def stopped(self, view: SessionView) -> None:
        """Keeps what a session committed here since it began, or was last parked; it has stopped decoding.

        The places of a passage are tokens of the answer; those that no source had drafted count as wrong.
        """
        first = max(view.request.prompt_length, view.opened, view.collected)
        view.collected = end = len(view.ids)
        tenant = view.key.tenant
        if not self._owner.may_keep(tenant, view.request.learn):
            return
        number = session_number(tenant, view.key.session)
        for start, low, high in cuts(first, end):
            passage = Passage(
                tenant,
                number,
                start,
                np.array(view.ids[start:high], dtype=np.uint32),
                np.zeros((high - low, 0), dtype=np.uint32),
                np.zeros((high - low, 0), dtype=np.float16),
                np.frombuffer(bytes(view.token_sources[low:high]), dtype=np.uint8) == 0,
            )
            self._buffer.add(passage, exam=is_exam(number))
