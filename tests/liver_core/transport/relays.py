"""Stream relays as processes, as an agent starts them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from typing import Any, Self

from liver_core.transport.relay.rank_user import RankUser

READY_S = 20.0
MYSELF = RankUser(os.getuid(), os.getgid())


class RelayProcess:
    """One relay. Leaving the context ends it. `enter`: a command that runs it elsewhere, for example in a namespace.
    `local`: its name there, a fresh one where none is given. `module`: the program."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        key: str = "secret",
        local: str = "",
        enter: tuple[str, ...] = (),
        module: str = "liver_core.transport.relay",
        **changes: Any,
    ):
        self.local = local or f"liver-test-relay-{uuid.uuid4().hex[:12]}"
        config = {
            "local": self.local,
            "host": host,
            "ports": [0, 0],
            "handoff_id": "handoff",
            "peer_keys": [key],
            "uids": [os.getuid()],
            **changes,
        }
        command = [*enter, sys.executable, "-m", module]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the relay)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(config) + "\n")
        self.process.stdin.flush()
        self.said: dict[str, Any] = json.loads(self.process.stdout.readline() or "{}")
        self.port: int = self.said.get("port", 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reads_served(self) -> int:
        """End it: how often it was read."""
        self.close()
        self._log.seek(0)
        found = re.search(r"served (\d+) reads", self._log.read())
        return int(found[1]) if found else 0

    def kill(self, with_signal: int = signal.SIGKILL) -> None:
        self.process.send_signal(with_signal)

    def close(self) -> int:
        """End it, however it stands, and return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            return self.process.wait(READY_S)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait(5)
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                pipe.close()  # A second time too.
