"""A metadata server that answers as a test says, also in ways that no sound server does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

DRIP_S = 0.02


@dataclass(frozen=True)
class Reply:
    """`drips`: the body comes one byte at a time and never ends. `flood_bytes`: it is so long, and of zeros."""

    status: int = 200
    body: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    drips: bool = False
    flood_bytes: int = 0


@dataclass
class Scripted:
    """`asked`: method and target of every request. `sent_bytes`: of bodies, in all."""

    url: str
    asked: list[str] = field(default_factory=list)
    sent_bytes: int = 0


@contextlib.asynccontextmanager
async def scripted(answer: Callable[[str], Reply]) -> AsyncIterator[Scripted]:
    """`answer` gets method and target of a request."""
    this = Scripted("")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            this.asked.append(" ".join(head.split()[:2]))
            await _send(writer, answer(this.asked[-1]), this)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    this.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield this
    finally:
        server.close()


async def _send(writer: asyncio.StreamWriter, reply: Reply, this: Scripted) -> None:
    length = reply.flood_bytes or (1_000_000 if reply.drips else len(reply.body.encode()))
    headers = {"Content-Length": str(length), "Connection": "close", **reply.headers}
    lines = [f"HTTP/1.1 {reply.status} Scripted", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    writer.write("\r\n".join(lines).encode())
    parts = [reply.body.encode()]
    if reply.drips:
        parts = [b"x"] * length
    if reply.flood_bytes:
        parts = [bytes(65_536)] * (reply.flood_bytes // 65_536)
    for part in parts:
        writer.write(part)
        this.sent_bytes += len(part)
        await writer.drain()
        if reply.drips:
            await asyncio.sleep(DRIP_S)


__all__ = ["Reply", "Scripted", "scripted"]
