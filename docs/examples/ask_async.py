"""The same from asyncio: many requests at a time over one connection, one of them cancelled."""

import asyncio
import sys

from outrider import AsyncClient


async def main(address: str) -> None:
    async with AsyncClient(address) as client:
        print([model.name for model in await client.models()])

        prompts = ["def fib(n):", "class Stack:", "import "]
        answers = await asyncio.gather(*(client.generate(prompt, max_tokens=24) for prompt in prompts))
        print([answer.text for answer in answers])

        async with client.stream("while True:", max_tokens=200, session="endless") as stream:
            async for chunk in stream:
                print(chunk.text, end="", flush=True)
                break  # leaving the block ends the request
        print(await client.cancel("endless"))  # from anywhere else; False: nothing runs any more


asyncio.run(main(sys.argv[1]))
