"""Keeps one zygote for a run directory: adopts the running one or starts one, and forks through it."""

import asyncio
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from agent.journal import Journal, Table
from agent.supervisor.job_user import JobUser
from agent.supervisor.process import ProcessIdentity, is_alive, send_signal, wait_end
from agent.supervisor.zygote_client import Exited, ForkRequest, ZygoteClient, ZygoteError, start_zygote

ZYGOTE_KEY = "zygote"
TERMINATE_S = 5.0
DEFAULT_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""One OpenMP thread, as torchrun sets it: more would start threads in the zygote and compete for the node's cores. What
is imported asks whether there is a GPU; answered by NVML that does not start CUDA, which no fork could use then."""


class ZygoteHost:
    """`on_exit` is called for every child that ended and that the zygote could reap."""

    def __init__(
        self,
        journal: Journal,
        *,
        run_dir: Path,
        socket_path: str,
        preload: str,
        environment: Mapping[str, str],
        job_user: JobUser | None = None,
        on_exit: Callable[[Exited], None],
    ) -> None:
        self._journal = journal
        self._run_dir = run_dir
        self._socket_path = socket_path
        self._preload = preload
        self._environment = dict(environment)
        self._job_user = job_user
        self._on_exit = on_exit
        self._client: ZygoteClient | None = None
        self._lock = asyncio.Lock()

    @property
    def problem(self) -> str:
        """Why the zygote cannot fork ranks; empty if it can."""
        return "" if self._client is None else str(self._client.hello.get("problem", ""))

    async def ensure(self) -> ZygoteClient:
        """A connected zygote. Raises ZygoteError."""
        async with self._lock:
            if self._client is not None and self._client.connected:
                return self._client
            process = self._known_process()
            if process is not None and not self._is_of_job_user():
                await (await self._connect(process)).end()
                await asyncio.to_thread(wait_end, process, TERMINATE_S)
                process = None
            self._client = await self._connect(process or await asyncio.to_thread(self._start))
            return self._client

    async def fork(self, request: ForkRequest) -> ProcessIdentity:
        """Fork a process. If the zygote has died meanwhile, start a new one and retry once."""
        client = await self.ensure()
        try:
            return await client.fork(request)
        except ZygoteError:
            if client.connected:
                raise
        return await (await self.ensure()).fork(request)

    async def end(self) -> None:
        """End the zygote, if there is one; its children keep running."""
        if (process := self._known_process()) is not None:
            await (await self._connect(process)).end()
        self._journal.delete(Table.ZYGOTE, ZYGOTE_KEY)

    async def end_with_children(self) -> None:
        """End the zygote and all its children, also one that an agent killed during the fork did not journal."""
        children: list[ProcessIdentity] = []
        if (process := self._known_process()) is not None:
            client = await self._connect(process)
            children = [ProcessIdentity.from_json(child) for child in client.hello["children"]]
            await client.end()
        self._journal.delete(Table.ZYGOTE, ZYGOTE_KEY)
        for child in children:
            send_signal(child, signal.SIGTERM)
            if not await asyncio.to_thread(wait_end, child, TERMINATE_S):
                send_signal(child, signal.SIGKILL)

    async def close(self) -> None:
        """Close the connection to the zygote."""
        if self._client is not None:
            await self._client.close()

    async def _connect(self, process: ProcessIdentity) -> ZygoteClient:
        client = ZygoteClient(self._socket_path, self._on_exit)
        await client.connect(process)
        return client

    def _is_of_job_user(self) -> bool:
        """Whether children of the running zygote become the user that they should. Older ones stay who they are."""
        record = self._journal.get(Table.ZYGOTE, ZYGOTE_KEY) or {}
        return record.get("job_user") == (None if self._job_user is None else self._job_user.to_text())

    def _known_process(self) -> ProcessIdentity | None:
        record = self._journal.get(Table.ZYGOTE, ZYGOTE_KEY)
        if record is None:
            return None
        process = ProcessIdentity.from_json(record)
        return process if is_alive(process) else None

    def _start(self) -> ProcessIdentity:
        log_path = self._run_dir / "zygote.log"
        environment = DEFAULT_ENVIRONMENT | self._environment
        process = start_zygote(self._socket_path, self._preload, log_path, environment, self._job_user)
        job_user = {} if self._job_user is None else {"job_user": self._job_user.to_text()}
        self._journal.put(Table.ZYGOTE, ZYGOTE_KEY, process.to_json() | job_user)
        return process
