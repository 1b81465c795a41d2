"""A network that can hold everything back for a while, or begin to swallow it: no end, no error, only silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Blackhole:
    """Passes bytes between its clients and one address, but not while it is held, and none after `swallow`.

    Attributes:
        address: host:port that clients use instead.
    """

    def __init__(self, target: str) -> None:
        self._target, self._swallows = target, False
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.address = ""

    def swallow(self) -> None:
        """From now on nothing arrives, not even that somebody has left."""
        self._swallows = True

    def hold(self) -> None:
        """What comes from now on arrives only after `let_go`."""
        self._open.clear()

    def let_go(self) -> None:
        """All that was held arrives."""
        self._open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a client."""
        host, _, port = self._target.rpartition(":")
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        self._writers += [writer, there_writer]
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while part := await source.read(1 << 16):
                await self._open.wait()
                if not self._swallows:
                    sink.write(part)
                    await sink.drain()
        except ConnectionError:
            pass
        if not self._swallows:
            sink.close()

    async def close(self) -> None:
        """Ends everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def blackhole(target: str) -> AsyncIterator[Blackhole]:
    """Starts one before host:port `target`."""
    hole = Blackhole(target)
    server = await asyncio.start_server(hole.serve, "127.0.0.1", 0)
    hole.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield hole
    finally:
        server.close()
        await hole.close()
