"""Ask an orchestrator over gRPC: whole answers, streams, several answers, and what can go wrong."""

import sys

from outrider import Client
from speculative.errors import InvalidRequest, OutriderError, Overloaded

with Client(sys.argv[1]) as client:  # host:port, or several with commas between them
    answer = client.generate("def fib(n):", max_tokens=32, temperature=0, timeout=30)
    print(answer.text, answer.finish_reason, answer.usage.acceptance_length)

    with client.stream("class Stack:", max_tokens=32, seed=7) as stream:
        for chunk in stream:  # what a round committed: several tokens
            print(chunk.text, end="", flush=True)
    print(stream.completion().usage.accepted_by_source)

    several = client.generate("import ", n=3, max_tokens=16, logprobs=True, top_logprobs=2)
    print([choice.text for choice in several.choices], several.logprobs[0].top)

    shaped = client.generate("is it so? ", max_tokens=8, regex="(yes|no)")
    print(shaped.text)

    edited = client.generate("again:", max_tokens=32, prediction=answer.text, sources=["prediction"])
    print(edited.usage.accepted_by_source)

    try:
        client.generate("x", temperature=-1)
    except InvalidRequest as error:
        print("refused:", error)
    except Overloaded as error:
        print("full; again in", error.retry_after_s, "s")
    except OutriderError as error:
        print("failed:", error)
