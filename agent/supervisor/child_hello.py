"""The first line that a process of the zygote says on its socket: one JSON object."""

import asyncio
import json
from typing import Any

from agent.supervisor.process import ProcessIdentity, is_alive

RETRY_S = 0.02
LINE_BYTES_MAX = 1 << 20


class SilentChild(Exception):
    """It has ended, or says nothing in time; the text says which, without naming it."""


async def hello_of(socket_path: str, process: ProcessIdentity, within_s: float) -> dict[str, Any]:
    """What the process that listens, or soon does, at `socket_path` says first. Raises SilentChild."""
    try:
        async with asyncio.timeout(within_s):
            while True:
                try:
                    reader, writer = await asyncio.open_unix_connection(socket_path, limit=LINE_BYTES_MAX)
                except OSError:
                    if not is_alive(process):
                        raise SilentChild("ended before it said anything") from None
                    await asyncio.sleep(RETRY_S)
                    continue
                try:
                    line = await reader.readline()
                except OSError:
                    line = b""  # It has ended with a connection that it had not taken.
                finally:
                    writer.close()
                if line:
                    return json.loads(line)
    except TimeoutError:
        raise SilentChild(f"said nothing within {within_s:g} s") from None
    except ValueError as error:
        raise SilentChild(f"said something else than a line of JSON: {error}") from None
