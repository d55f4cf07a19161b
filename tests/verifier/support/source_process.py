"""A fake source as a process of its own: drafts random trees; prints its address."""

import asyncio

from fake_source import FakeSource, Garbage, running


async def main() -> None:
    async with running(FakeSource(Garbage())) as server:
        print(server.address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
