"""What a process tells the service manager that started it: that it is ready, alive, stopping. The protocol is that of
systemd's sd_notify(3), datagrams to the socket that NOTIFY_SOCKET names. Without that variable nothing is sent."""

import contextlib
import os
import socket
from collections.abc import MutableMapping

PINGS_PER_WATCHDOG = 3
LEAST_WATCHDOG_S = 0.3


class ServiceManager:
    """`watchdog_s`: how long the manager waits for a sign of life before it restarts the process; 0: it does not."""

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = watchdog_s

    @property
    def ping_s(self) -> float:
        """Time between two signs of life; 0: none are wanted."""
        return self.watchdog_s / PINGS_PER_WATCHDOG

    def ready(self, status: str) -> bool:
        """The process does its work from now on."""
        return self._send("READY=1", f"STATUS={status}")

    def alive(self) -> bool:
        """A sign of life, for the watchdog."""
        return self._send("WATCHDOG=1")

    def stopping(self, status: str) -> bool:
        """The process is about to end."""
        return self._send("STOPPING=1", f"STATUS={status}")

    def _send(self, *lines: str) -> bool:
        """Whether it was sent. It never waits, and what goes wrong is not the process's business."""
        if not self._address:
            return False
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out,
        ):
            out.setblocking(False)
            out.sendto("\n".join(lines).encode(), self._address)
            return True
        return False


def take_service_manager(environ: MutableMapping[str, str]) -> ServiceManager:
    """The manager that the environment names. Its variables are taken out, so that no child speaks in our name."""
    address, wait_us, pid = (environ.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"))
    is_meant = not pid or pid == str(os.getpid())
    watchdog_s = int(wait_us) / 1e6 if wait_us.isdigit() and is_meant else 0.0
    return ServiceManager(
        address if address[:1] in ("/", "@") else "", max(watchdog_s, LEAST_WATCHDOG_S) if watchdog_s else 0.0
    )
