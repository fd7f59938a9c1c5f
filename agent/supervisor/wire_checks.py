"""Wires that are measured from here: the two ends, each a process of its own (agent.supervisor.wire_child)."""

import contextlib
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from agent.protocol.wires import WireOffer, WireSpeed
from agent.supervisor.child_hello import SilentChild, hello_of
from agent.supervisor.process import ProcessIdentity
from agent.supervisor.supervisor import wait_process_end
from agent.supervisor.wire_child import LIMIT_S
from agent.supervisor.zygote_client import ForkRequest, ZygoteError
from agent.supervisor.zygote_host import ZygoteHost
from liver_core.layout.limits import fitting

ENTRY = "agent.supervisor.wire_child"
GRACE_S = 5.0


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

    async def offer(self, job_id: str, check_id: str, relay: str) -> tuple[WireOffer, Awaitable[None]]:
        """Start the end that is read; also what waits until it has ended, by itself. Raises WireError."""
        process, said = await self._start("serve", job_id, check_id, {"relay": relay})
        return WireOffer.model_validate_json(said), wait_process_end(process)

    async def measure(self, job_id: str, check_id: str, relay: str, offer: WireOffer, bytes_max: int) -> WireSpeed:
        """Read what another agent has offered. Raises WireError."""
        more = {"relay": relay, "bytes_max": bytes_max, **offer.model_dump(mode="json")}
        _, said = await self._start("read", job_id, check_id, more)
        return WireSpeed.model_validate_json(said)

    async def _start(self, end: str, job_id: str, check_id: str, spec: dict[str, Any]) -> tuple[ProcessIdentity, str]:
        path = self.socket_path("w", job_id, f"{end}-{check_id[:8]}")
        request = ForkRequest(
            name=f"wire/{end}/{check_id}",
            entry=f"{ENTRY}:{end}",
            spec={"name": f"{end}/{check_id}", "host": self.host, "rdma": self.has_gpus, **spec},
            log_path=self.log_path,
            socket_path=path,
            environment={"CUDA_VISIBLE_DEVICES": ""},
        )
        try:
            process = await self.zygote.fork(request)
            said = await hello_of(path, process, LIMIT_S + GRACE_S)
        except (SilentChild, ZygoteError, OSError) as error:
            raise WireError(
                f"the process that measures {error}" if isinstance(error, SilentChild) else str(error)
            ) from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
        if "error" in said:
            raise WireError(fitting(str(said["error"])))
        return process, json.dumps(said)
