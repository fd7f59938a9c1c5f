"""The store children of one node: one per generation of a job, forked by the zygote, adopted after a restart.

A store that died is never started again for its generation: an empty decision record would allow a second decision.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from agent.journal import Journal, Table
from agent.supervisor.child_hello import SilentChild, hello_of
from agent.supervisor.process import is_alive, send_signal
from agent.supervisor.records import StoreKey, StoreRecord
from agent.supervisor.supervisor import Supervisor, wait_process_end
from agent.supervisor.zygote_client import ForkRequest, ZygoteError
from agent.supervisor.zygote_host import ZygoteHost
from liver_core.handoff import StoreAddress
from liver_core.layout import from_json, to_json

STORE_ENTRY = "agent.supervisor.store_child:run"
READY_S = 20.0
END_S = 5.0


class StoreError(Exception):
    """No store listens; the text says why."""


class Stores:
    """`on_exit` is called for each store that ended without `retire`."""

    def __init__(
        self,
        journal: Journal,
        zygote: ZygoteHost,
        supervisor: Supervisor,
        *,
        log_path: str,
        entry: str = STORE_ENTRY,
        on_exit: Callable[[StoreKey], None],
    ) -> None:
        self._journal = journal
        self._zygote = zygote
        self._supervisor = supervisor
        self._log_path = log_path
        self._entry = entry
        self._on_exit = on_exit
        self._records: dict[StoreKey, StoreRecord] = {}
        self._tasks: dict[StoreKey, asyncio.Task[None]] = {}
        self._locks: dict[StoreKey, asyncio.Lock] = {}
        self._died: set[StoreKey] = set()
        self._retiring: set[StoreKey] = set()

    def adopt(self) -> None:
        """Watch the stores in the journal."""
        for text, data in self._journal.items(Table.STORE):
            self._watch(StoreKey.parse(text), from_json(StoreRecord, data))

    def address(self, key: StoreKey) -> StoreAddress | None:
        """Where the store of this generation listens; None if this node does not host it."""
        record = self._records.get(key)
        return None if record is None else record.address

    @property
    def hosted(self) -> tuple[tuple[StoreKey, StoreAddress], ...]:
        """Every store of this node."""
        return tuple((key, record.address) for key, record in self._records.items())

    async def host(self, key: StoreKey, host: str) -> StoreAddress:
        """The store of this generation, started unless it runs. Raises StoreError."""
        async with self._locks.setdefault(key, asyncio.Lock()):
            known = self._records.get(key)
            if key in self._retiring:
                raise StoreError(f"the store of {key} is being ended")
            if known is not None and is_alive(known.process):
                return known.address
            if known is not None or key in self._died:
                raise StoreError(f"the store of {key} died, and a store is never started again for its generation")
            socket_path = self._supervisor.socket_path("s", key.job_id, str(key.generation))
            try:
                process = await self._zygote.fork(
                    ForkRequest(
                        name=f"store/{key}",
                        entry=self._entry,
                        spec={"host": host},
                        log_path=self._log_path,
                        socket_path=socket_path,
                        environment={},
                    )
                )
                hello = await hello_of(socket_path, process, READY_S)
            except SilentChild as error:
                raise StoreError(f"the store {error}; see stores.log") from error
            except (ZygoteError, OSError) as error:
                raise StoreError(str(error)) from error
            address = StoreAddress(host=hello["host"], port=hello["port"])
            record = StoreRecord(process, socket_path, address)
            await asyncio.to_thread(self._journal.put, Table.STORE, str(key), to_json(record))
            self._watch(key, record)
            return address

    async def retire(self, key: StoreKey) -> None:
        """End the store; its generation is over. It is known here and on disk until it has ended, and told to end from
        the first call on: what an interrupted one has left ends by itself, or the next call ends it."""
        record = self._records.get(key)
        if record is None:
            return
        self._retiring.add(key)
        for number in (signal.SIGTERM, signal.SIGKILL):
            send_signal(record.process, number)
            if (await asyncio.wait([self._tasks[key]], timeout=END_S))[0]:
                return

    async def retire_all(self) -> None:
        """End every store of this node."""
        for key in tuple(self._records):
            await self.retire(key)

    async def close(self) -> None:
        """Stop watching; the stores keep running."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _watch(self, key: StoreKey, record: StoreRecord) -> None:
        self._records[key] = record
        self._tasks[key] = asyncio.create_task(self._follow(key, record))

    async def _follow(self, key: StoreKey, record: StoreRecord) -> None:
        """Wait until the store has ended, and forget it. It has died only if nobody has told it to end."""
        await wait_process_end(record.process)
        _unlink(record)
        if key not in self._retiring:
            self._died.add(key)
        await asyncio.to_thread(self._journal.delete, Table.STORE, str(key))
        del self._records[key], self._tasks[key]
        if key in self._died:
            self._on_exit(key)
        self._retiring.discard(key)
        self._locks.pop(key, None)


def _unlink(record: StoreRecord) -> None:
    """The store itself may not be able to: its user cannot enter the folder."""
    with contextlib.suppress(OSError):
        os.unlink(record.socket_path)
