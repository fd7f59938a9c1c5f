"""The line between the agent and one rank process: commands down, events up, reconnecting while the process lives."""

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
    """`on_event` is called in the event loop for each message, `on_garbage` with the reason for what is not one.

    Nothing is queued: a command that cannot be sent now returns False, and whoever wanted it says it again at the next
    hello, since all commands say a whole wanted state.
    """

    def __init__(
        self,
        socket_path: str,
        process: ProcessIdentity,
        *,
        on_event: Callable[[RankEvent], None],
        on_garbage: Callable[[str], None],
    ) -> None:
        self._socket_path = socket_path
        self._process = process
        self._on_event = on_event
        self._on_garbage = on_garbage
        self._writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Until the process has ended."""
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
        """Whether the command was handed to the kernel; no promise that the rank has read it."""
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
        """Ask for hello and the true stage."""
        return await self.send(StatusQuery())

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while True:
                try:
                    line = await reader.readline()
                except ValueError:
                    self._on_garbage(f"a line of more than {LINE_BYTES_MAX} bytes")
                    return
                if not line.endswith(b"\n"):
                    return
                try:
                    event = decode_event(line)
                except ValidationError as error:
                    first = error.errors()[0]
                    self._on_garbage(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
                    continue
                self._on_event(event)
