"""A draft source that learns what the target found likely after each token, whether it was chosen or not."""

import asyncio
import sys

from outrider.source.followed import FollowedSession, SourceProfile
from outrider.source.server import serve_source
from outrider.source.worker import AnsweringWorker

PROFILE = SourceProfile(name="recycling", model="what was likely last time", tops=4)


class Recycling(AnsweringWorker[FollowedSession]):
    def open(self, follow, ids, kept):
        session = FollowedSession(follow, ids)
        session.following = {}
        return session

    def observed(self, session, said):
        first = len(session.ids) - len(said.tops)
        for place, top in enumerate(said.tops, start=first):
            session.following[session.ids.array[place - 1]] = top.ids
        for row in said.off_path:
            session.following[row.last] = row.top_ids

    def draft(self, session):
        tokens = session.following.get(session.ids.array[-1], ())
        if tokens:
            survival = [0.5**rank for rank in range(1, len(tokens) + 1)]
            yield session.fragment(tokens, [-1] * len(tokens), survival)


if __name__ == "__main__":
    address = sys.argv[1] if sys.argv[1:] else "127.0.0.1:50072"
    asyncio.run(serve_source(lambda publish: Recycling(PROFILE, publish), address))
