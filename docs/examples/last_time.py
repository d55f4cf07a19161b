"""A draft source: what followed the session's last id the time before. A process that verifiers attach to."""

import asyncio
from contextlib import aclosing

import grpc.aio

from outrider.source.events import Broken, End, Event, Follow, Outgoing, Progress
from outrider.source.streams import AttachStreams
from outrider.v1 import draft_source_pb2 as pb
from outrider.v1 import draft_source_pb2_grpc as rpc
from speculative.fragment import Fragment
from speculative.hashing import prefix_hash


class LastTime(rpc.DraftSourceServicer):
    def __init__(self) -> None:
        self.streams = AttachStreams(dropped=lambda nodes: None)
        self.sessions: dict[tuple[int, int], tuple[int, list[int]]] = {}  # epoch and ids, by stream and alias

    async def Describe(self, request, context):
        return pb.SourceDescription(name="last-time", model="what came last time")

    async def Attach(self, requests, context):
        drafts = self.streams.attach(requests, context, self.heard, model="", tokenizer_digest="")
        async with aclosing(drafts):
            async for message in drafts:
                yield message

    def heard(self, event: Event) -> None:
        match event:
            case Follow(stream, alias, _, request):
                self.sessions[stream, alias] = (request.epoch, list(request.ids))
            case Progress(stream, alias, _, ids, _) if (stream, alias) in self.sessions:
                self.sessions[stream, alias][1].extend(ids)
            case End(stream, alias):
                self.sessions.pop((stream, alias), None)
                return
            case Broken(stream):
                self.sessions = {key: kept for key, kept in self.sessions.items() if key[0] != stream}
                return
            case _:
                return
        epoch, ids = self.sessions[stream, alias]
        if (tokens := continuation(ids, most=4)) != ():
            likely = tuple(0.5**depth for depth in range(1, len(tokens) + 1))
            chain = tuple(range(-1, len(tokens) - 1))
            fragment = Fragment(1, epoch, len(ids), prefix_hash(ids), tokens, chain, likely)
            self.streams.publish({stream: Outgoing([(alias, fragment)])})


def continuation(ids: list[int], most: int) -> tuple[int, ...]:
    for place in range(len(ids) - 2, -1, -1):
        if ids[place] == ids[-1]:
            return tuple(ids[place + 1 : place + 1 + most])
    return ()


async def main() -> None:
    server = grpc.aio.server()
    rpc.add_DraftSourceServicer_to_server(LastTime(), server)
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
