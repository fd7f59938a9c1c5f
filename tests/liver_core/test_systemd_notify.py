"""What a service manager hears, on a real socket."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from liver_core.systemd_notify import ServiceManager, take_service_manager


@pytest.fixture
def manager_socket(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(10)
        yield listener


def test_ready_alive_and_stopping_are_datagrams_of_sd_notify(manager_socket: socket.socket) -> None:
    manager = ServiceManager(manager_socket.getsockname())
    assert manager.ready("serves") and manager.alive() and manager.stopping("soon")
    heard = [manager_socket.recv(1_000).decode() for _ in range(3)]
    assert heard == ["READY=1\nSTATUS=serves", "WATCHDOG=1", "STOPPING=1\nSTATUS=soon"]


def test_an_abstract_socket_is_reached_by_its_name() -> None:
    name = f"liver-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        listener.settimeout(10)
        assert ServiceManager(f"@{name}").alive()
        assert listener.recv(100) == b"WATCHDOG=1"


def test_without_a_manager_or_with_one_that_is_gone_nothing_is_sent_and_nothing_fails(tmp_path: Path) -> None:
    assert not ServiceManager().ready("serves")
    assert not ServiceManager(str(tmp_path / "gone")).alive()


def test_the_environment_is_taken_out_so_that_no_child_speaks_for_the_process() -> None:
    environ = {"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid()), "A": "b"}
    manager = take_service_manager(environ)
    assert environ == {"A": "b"}
    assert (manager.watchdog_s, manager.ping_s) == (60, 20)


@pytest.mark.parametrize(
    "environ",
    [{}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, {"NOTIFY_SOCKET": "vsock:2:9"}],
)
def test_a_watchdog_that_is_not_ours_gets_no_pings(environ: dict[str, str]) -> None:
    manager = take_service_manager(environ)
    assert manager.ping_s == 0 and not manager.alive()
