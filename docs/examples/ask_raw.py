"""Without the client: the generated stubs alone, as any language has them."""

import sys

import grpc

from outrider.v1 import common_pb2, generation_pb2
from outrider.v1.generation_pb2_grpc import GenerationStub

with grpc.insecure_channel(sys.argv[1]) as channel:
    start = generation_pb2.GenerateStart(
        tenant="acme",
        text="def fib(n):",
        max_tokens=32,
        sampling=common_pb2.Sampling(temperature=0.8, top_p=0.95),
        seed=7,
    )
    requests = iter([generation_pb2.GenerateRequest(start=start)])
    for response in GenerationStub(channel).Generate(requests, timeout=30):
        match response.WhichOneof("body"):
            case "started":
                print("session", response.started.session, "seed", response.started.seed)
            case "tokens":
                print(response.tokens.text, end="", flush=True)
            case "finished":
                print("\nbecause of", common_pb2.FinishReason.Name(response.finished.reason))
