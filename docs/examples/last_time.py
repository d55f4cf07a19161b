"""A draft source: what followed the session's last id the time before. A process that verifiers attach to."""

import asyncio
import sys

from outrider.source.followed import FollowedSession, SourceProfile
from outrider.source.server import serve_source
from outrider.source.worker import AnsweringWorker

PROFILE = SourceProfile(name="last-time", model="what came last time")


class LastTime(AnsweringWorker[FollowedSession]):
    def open(self, follow, ids, kept):
        return FollowedSession(follow, ids)

    def draft(self, session):
        if tokens := continuation(session.ids.array, most=4):
            chain = range(-1, len(tokens) - 1)
            survival = [0.5**depth for depth in range(1, len(tokens) + 1)]
            yield session.fragment(tokens, chain, survival)


def continuation(ids, most):
    for place in range(len(ids) - 2, -1, -1):
        if ids[place] == ids[-1]:
            return ids[place + 1 : place + 1 + most]
    return ids[:0]


if __name__ == "__main__":
    address = sys.argv[1] if sys.argv[1:] else "127.0.0.1:50071"
    asyncio.run(serve_source(lambda publish: LastTime(PROFILE, publish), address))
