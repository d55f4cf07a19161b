"""A draft source: what followed the session's last id the time before. A process that verifiers attach to."""

import asyncio
import sys

import grpc.aio

from outrider.source.followed import FollowedSession, SourceProfile
from outrider.source.server import SourceServer
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


async def main(address: str = "127.0.0.1:50071") -> None:
    source = SourceServer(lambda publish: LastTime(PROFILE, publish))
    server = grpc.aio.server()
    source.register(server)
    port = server.add_insecure_port(address)
    await source.start()
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
