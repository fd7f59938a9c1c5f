"""The link of the agent to one rank process: sends commands, receives events, reconnects while the process lives."""

import asyncio
import contextlib
from collections.abc import Callable

from pydantic import ValidationError

from agent.protocol.rank import LINE_BYTES_MAX, RankEvent, StatusQuery, decode_event, encode_line
from agent.protocol.values import Message
from agent.supervisor.process import ProcessIdentity, is_alive

RETRY_S = 0.05
RETRY_MAX_S = 1.0
SEND_S = 5.0


class RankLink:
    """`on_event` is called in the event loop for each message, `on_malformed` with the reason for any other line.

    Nothing is queued: `send` returns False if it cannot send now, and the caller sends the command again at the next
    hello. That is safe, because every command contains the whole wanted state.
    """

    def __init__(
        self,
        socket_path: str,
        process: ProcessIdentity,
        *,
        on_event: Callable[[RankEvent], None],
        on_malformed: Callable[[str], None],
    ) -> None:
        self._socket_path = socket_path
        self._process = process
        self._on_event = on_event
        self._on_malformed = on_malformed
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Connect and read until the process has ended."""
        retry_s = RETRY_S
        while is_alive(self._process):
            try:
                reader, self._writer = await asyncio.open_unix_connection(self._socket_path, limit=LINE_BYTES_MAX)
            except OSError:
                await asyncio.sleep(retry_s)
                retry_s = min(RETRY_MAX_S, retry_s * 1.5)
                continue
            retry_s = RETRY_S
            try:
                await self._read(reader)
            finally:
                self._writer.close()
                self._writer = None
            await asyncio.sleep(RETRY_S)

    async def send(self, command: Message) -> bool:
        """Whether the kernel accepted the command; the rank may not have read it."""
        writer = self._writer
        if writer is None or writer.is_closing():
            return False
        try:
            async with asyncio.timeout(SEND_S):
                writer.write(encode_line(command))
                await writer.drain()
        except (OSError, TimeoutError):
            return False
        return True

    async def query(self) -> bool:
        """Request hello and the current stage."""
        return await self.send(StatusQuery())

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while True:
                try:
                    line = await reader.readline()
                except ValueError:
                    self._on_malformed(f"a line of more than {LINE_BYTES_MAX} bytes")
                    return
                if not line.endswith(b"\n"):
                    return
                try:
                    event = decode_event(line)
                except ValidationError as error:
                    first = error.errors()[0]
                    self._on_malformed(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
                    continue
                self._on_event(event)
