"""Wires that are measured from here: the two ends, each a process of its own (agent.supervisor.wire_child)."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from agent.protocol.values import Message
from agent.protocol.wires import WireOffer, WireSpeed
from agent.supervisor.child_hello import SilentChild, hello_of
from agent.supervisor.process import ProcessIdentity, send_signal
from agent.supervisor.supervisor import wait_process_end
from agent.supervisor.wire_child import LIMIT_S
from agent.supervisor.zygote_client import ForkRequest, ZygoteError
from agent.supervisor.zygote_host import ZygoteHost

ENTRY = "agent.supervisor.wire_child"
GRACE_S = 5.0
MessageT = TypeVar("MessageT", bound=Message)


class WireError(Exception):
    """A wire that could not be measured; the text says why."""


@dataclass(frozen=True, slots=True)
class WireChecks:
    """Of one node. `socket_path`: of a child of this job and name. `has_gpus`: state may lie on GPUs, so NIXL may use
    what reaches these. The ends themselves use host memory only, and see no GPU."""

    zygote: ZygoteHost
    socket_path: Callable[[str, str, str], str]
    log_path: str
    host: str
    has_gpus: bool

    @contextlib.asynccontextmanager
    async def offer(self, job_id: str, check_id: str, relay: str) -> AsyncIterator[tuple[WireOffer, Awaitable[None]]]:
        """Start the end that is read, and end it after the context: what it offers, and what waits until it has ended
        by itself. Raises WireError."""
        async with self._child("serve", job_id, check_id, {"relay": relay}) as (process, said):
            async with asyncio.timeout(LIMIT_S + GRACE_S):
                yield _read(WireOffer, said), wait_process_end(process)

    async def measure(self, job_id: str, check_id: str, relay: str, offer: WireOffer, bytes_max: int) -> WireSpeed:
        """Read what another agent has offered. Raises WireError."""
        more = {"relay": relay, "bytes_max": bytes_max, **offer.model_dump(mode="json")}
        async with self._child("read", job_id, check_id, more) as (_, said):
            return _read(WireSpeed, said)

    @contextlib.asynccontextmanager
    async def _child(
        self, end: str, job_id: str, check_id: str, spec: dict[str, Any]
    ) -> AsyncIterator[tuple[ProcessIdentity, dict[str, Any]]]:
        """One end, and what it says first. It does not outlive the context."""
        path = self.socket_path("w", job_id, f"{end}-{check_id[:8]}")
        request = ForkRequest(
            name=f"wire/{end}/{check_id}",
            entry=f"{ENTRY}:{end}",
            spec={"name": f"{end}/{check_id}", "host": self.host, "rdma": self.has_gpus, **spec},
            log_path=self.log_path,
            socket_path=path,
            environment={"CUDA_VISIBLE_DEVICES": ""},
        )
        process = None
        try:
            process = await self.zygote.fork(request)
            said = await hello_of(path, process, LIMIT_S + GRACE_S)
            if "error" in said:
                raise WireError(str(said["error"]))
            yield process, said
        except SilentChild as error:
            raise WireError(f"the process that measures {error}; see wires.log") from error
        except (ZygoteError, OSError) as error:
            raise WireError(str(error) or "it took too long") from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
            if process is not None:
                send_signal(process, signal.SIGKILL)


def _read(kind: type[MessageT], said: dict[str, Any]) -> MessageT:
    try:
        return kind.model_validate_json(json.dumps(said))
    except ValidationError as error:
        first = error.errors()[0]
        raise WireError(f"the process that measures said {first['loc']}: {first['msg']}") from None
