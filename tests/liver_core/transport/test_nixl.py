"""What only the NIXL transport promises: no progress needed over shared memory, nothing lands after a timeout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from liver_core.transport.nixl import KEPT_READS_MAX, NixlTransport, _is_small, _Post, _Progress
from liver_core.transport.protocol import Call, Read, Transport, TransportError
from liver_core.transport.ucx import NixlAgent, Ucx, Where, has_gpu, interface_of, rdma_devices, ucx_environment
from tests.debian import needs
from tests.liver_core.transport.ranks import Rank, Run, run_ranks
from tests.liver_core.transport.test_contract import NUMEL, connected, leave, numbers, same_bits, soon

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

KEEPALIVE_S = 20.0
"""UCX's own default."""


def test_over_shared_memory_the_source_needs_no_progress_once_connected():
    assert run_ranks("nixl", 2, read_without_progress) == [True, True]


def test_over_shared_memory_a_stopped_process_is_still_readable():
    assert run_ranks("nixl", 2, read_a_stopped_process) == [True, True]


@pytest.mark.thorough
def test_over_shared_memory_the_source_needs_no_progress_however_long_ago_it_was_connected():
    # UCX's default is a keepalive after 20 s; while it waits for an answer, reads do too.
    assert run_ranks("nixl", 2, read_for_longer_than_a_keepalive) == [True, True]


def test_what_could_only_be_emulated_over_tcp_is_refused_and_the_source_lives():
    assert run_ranks("nixl-tcp", 2, connect_over_tcp) == [True, True]


def test_a_peer_on_another_machine_is_refused_without_devices_and_has_to_prove_itself_with_them():
    assert run_ranks("nixl", 2, connect_to_another_machine) == [True, True]
    assert run_ranks("nixl", 2, connect_to_another_machine_with_devices) == [True, True]


def test_a_peer_whose_memory_may_not_be_read_is_refused_with_the_reason_of_the_kernel():
    assert run_ranks("nixl", 2, connect_to_a_stranger) == [True, True]


def test_an_endpoint_that_was_replaced_under_its_address_is_found_out_on_connect():
    assert run_ranks("nixl", 2, connect_with_a_wrong_token) == [True, True]


def test_settings_leave_signals_alone_and_never_overrule_the_environment():
    script = (
        "import os\n"
        "from liver_core.transport.nixl import NixlTransport\n"
        "from liver_core.transport.ucx import Ucx\n"
        "def caught(): return [l for l in open('/proc/self/status') if l.startswith('SigCgt')]\n"
        "import torch; before = caught()\n"
        "t = NixlTransport('one', Ucx('lo')); t.start_progress(); t.close()\n"
        "assert caught() == before, (before, caught())\n"
        "assert os.environ['UCX_TLS'] == 'tcp,self', os.environ['UCX_TLS']\n"
    )
    environment = {**os.environ, "UCX_TLS": "tcp,self"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "UCX_TLS" not in ucx_environment(interface="", host_memory_only=False)


@pytest.mark.thorough
@pytest.mark.parametrize("host_memory_only", [True, False])
def test_a_process_that_used_an_endpoint_ends_normally_on_a_machine_with_the_userland_of_rdma(host_memory_only: bool):
    efa = needs("libefa.so.1")
    script = (
        "from liver_core.transport.nixl import NixlTransport\n"
        "from liver_core.transport.ucx import Ucx\n"
        f"t = NixlTransport('one', Ucx('lo', host_memory_only={host_memory_only}))\n"
        "t.start_progress(); t.close()\n"
        "print(*{line.split()[-1] for line in open('/proc/self/maps') if '/lib' in line}, sep='\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines())
    assert os.path.realpath(efa) in loaded, "UCX's module for EFA was not loaded, so this shows nothing"
    assert len([path for path in loaded if Path(path).name.startswith("libnl-route-3")]) == 2


@pytest.mark.parametrize("host_memory_only", [True, False])
def test_no_profile_lets_ucx_emulate_reads(host_memory_only: bool):
    settings = ucx_environment(interface="eth0", host_memory_only=host_memory_only)
    assert settings["UCX_PROTO_EMULATION_ENABLE"] == "n"
    assert ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY" in settings) is not host_memory_only


def test_where_all_memory_is_the_hosts_ucx_weighs_only_what_reads_one_sidedly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("liver_core.transport.ucx.has_gpu", lambda: False)
    settings = ucx_environment(interface="eth0", host_memory_only=True)
    assert set(settings["UCX_PROTOS"].split(",")) == {"get/bcopy", "get/zcopy", "reconfig"}
    assert "UCX_PROTOS" not in ucx_environment(interface="eth0", host_memory_only=False)
    monkeypatch.setattr("liver_core.transport.ucx.has_gpu", lambda: True)
    assert "UCX_PROTOS" not in ucx_environment(interface="eth0", host_memory_only=True), "cuda_copy needs more"


def test_ucx_may_copy_from_gpus_and_use_all_rdma_devices_where_there_are_any(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("liver_core.transport.ucx.has_gpu", lambda: True)
    monkeypatch.setattr("liver_core.transport.ucx.rdma_devices", lambda: ("mlx5_0:1", "mlx5_1:1"))
    host, devices = (ucx_environment(interface="eth0", host_memory_only=only) for only in (True, False))
    assert "cuda_copy" in host["UCX_TLS"].split(",") and host["UCX_NET_DEVICES"] == "eth0"
    assert devices["UCX_NET_DEVICES"] == "eth0,mlx5_0:1,mlx5_1:1"


def test_a_device_that_refuses_to_flush_is_a_peer_that_cannot_be_read_one_sidedly():
    assert run_ranks("nixl", 2, connect_without_flush) == [True, True]


def test_gpus_and_rdma_devices_are_found_without_their_drivers(tmp_path: Path):
    assert not has_gpu(tmp_path) and rdma_devices(tmp_path) == ()
    for name, vendor, kind in (("a", "0x8086", "0x030000"), ("b", "0x10de", "0x020000"), ("c", "0x10de", "0x030200")):
        assert not has_gpu(tmp_path)
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert has_gpu(tmp_path)
    for port in ("mlx5_1/ports/1", "mlx5_0/ports/1", "mlx5_0/ports/2"):
        (tmp_path / port).mkdir(parents=True)
    assert rdma_devices(tmp_path) == ("mlx5_0:1", "mlx5_0:2", "mlx5_1:1")


def test_the_ports_of_efa_are_not_given_to_ucx(tmp_path: Path):
    for name, vendor in (("rdmap16s27", "0x1d0f"), ("mlx5_0", "0x15b3")):
        (tmp_path / name / "ports/1").mkdir(parents=True)
        (tmp_path / name / "device").mkdir()
        (tmp_path / name / "device/vendor").write_text(f"{vendor}\n")
    assert rdma_devices(tmp_path) == ("mlx5_0:1",)


def test_only_the_given_interface_is_listened_on():
    assert run_ranks("nixl", 1, listening_addresses) == [["127.0.0.1"]]


def test_an_address_is_turned_into_the_device_that_has_it():
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ValueError, match=r"no network device has the address 203\.0\.113\.9"):
        interface_of("203.0.113.9")


def test_a_look_that_comes_again_is_prepared_once_for_each_peer_and_sees_what_was_written_since():
    assert run_ranks("nixl", 2, look_again_and_again) == [True, True]


def test_so_many_different_looks_are_kept_and_no_read_of_state():
    assert run_ranks("nixl", 2, look_at_many_places) == [True, True]


def test_a_look_at_the_counters_of_many_sources_is_kept_too_and_a_read_of_state_is_not():
    look = [Read(peer, "counters", (Run(0, 0, 1), Run(8, 8, 1))) for peer in range(256)]
    assert _is_small(look)
    assert not _is_small([Read(0, "master", (Run(0, 0, 4096),))])


def test_a_look_at_a_source_that_is_gone_fails_each_time_and_is_not_kept():
    assert run_ranks("nixl", 2, look_at_one_that_is_gone)[0] is True


def test_a_batch_that_fails_does_not_end_a_read_while_another_of_its_peer_still_lands():
    looks: list[str] = []

    class Reader:
        """One batch has failed. The other lands at the third look."""

        def landed(self, where: Where, handle: str, *, keep: bool) -> bool:
            assert not keep
            looks.append(handle)
            if handle == "failed":
                raise TransportError(where.phase, "the read failed", peer=where.peer, kind=where.kind)
            return looks.count(handle) == 3

    for order in (["failed", "lands"], ["lands", "failed"]):
        looks.clear()
        endpoint = NixlTransport("reader", Ucx())
        endpoint._reader = Reader()  # type: ignore[assignment]
        work = _Progress(peer=1, pending=deque(), flying=[_Post("master", (), handle=handle) for handle in order])
        with pytest.raises(TransportError, match="the read failed"):
            endpoint._run([work], time.monotonic(), soon(5))
        assert (looks.count("lands"), looks.count("failed")) == (3, 1), "its bytes may still be on the way"
        assert work.done


def test_the_handle_of_a_read_that_failed_is_released():
    released: list[str] = []

    class Agent:
        def check_xfer_state(self, handle: str) -> str:
            return handle

        def release_xfer_handle(self, handle: str) -> None:
            released.append(handle)

    agent = NixlAgent.__new__(NixlAgent)
    agent._agent = Agent()
    where = Where(Call.READ, 1, "master")
    assert not agent.landed(where, "PROC")
    assert agent.landed(where, "DONE", keep=True)
    assert released == [], "it is asked again"
    assert agent.landed(where, "DONE")
    with pytest.raises(TransportError, match="the read failed"):
        agent.landed(where, "ERR", keep=True)
    assert released == ["DONE", "ERR"]


def halt(pid: int) -> None:
    """SIGSTOP, and wait until every thread stands: the signal returns before a thread on another core has seen it."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 5
    while any(state != "T" for state in states(pid)):
        assert time.monotonic() < end, f"process {pid} does not stop"


def states(pid: int) -> list[str]:
    """Of each thread, as proc(5) has it."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads]


def read_without_progress(rank: Rank) -> bool:
    target = torch.zeros(NUMEL)
    endpoint = connected(rank, {"master": numbers(rank.rank)}, {"master": target})
    endpoint.stop_progress()
    rank.exchange()
    if rank.rank == 0:
        endpoint.read([Read(1, "master", (Run(0, 0, NUMEL),))], soon(2))
        assert same_bits(target, numbers(1))
    leave(rank, endpoint)
    return True


def read_for_longer_than_a_keepalive(rank: Rank) -> bool:
    endpoint = connected(rank, {"master": numbers(rank.rank)}, {"master": torch.zeros(NUMEL)})
    endpoint.stop_progress()
    rank.exchange()
    end, pause = time.monotonic() + KEEPALIVE_S + 2, threading.Event()
    while time.monotonic() < end:
        pause.wait(0.05)
        endpoint.read([Read(1 - rank.rank, "master", (Run(0, 0, NUMEL),))], soon(2))
    rank.exchange()
    leave(rank, endpoint)
    return True


def read_a_stopped_process(rank: Rank) -> bool:
    target = torch.zeros(NUMEL)
    endpoint = connected(rank, {"master": numbers(rank.rank)}, {"master": target})
    other = int(rank.exchange(str(os.getpid()).encode())[1 - rank.rank] or 0)
    if rank.rank == 0:
        halt(other)
        try:
            endpoint.read([Read(1, "master", (Run(0, 0, NUMEL),))], soon(2))
        finally:
            os.kill(other, signal.SIGCONT)
        assert same_bits(target, numbers(1))
    leave(rank, endpoint)
    return True


def counted(endpoint: Transport) -> list[str]:
    """The kinds of all reads that NIXL has prepared since."""
    assert isinstance(endpoint, NixlTransport)
    prepared: list[str] = []
    reader = endpoint._reading()
    prepare = reader.prepare

    def noted(where: Where, *arguments: Any) -> Any:
        prepared.append(where.kind or "")
        return prepare(where, *arguments)

    reader.prepare = noted  # type: ignore[method-assign]
    return prepared


def look_again_and_again(rank: Rank) -> bool:
    source = {"counter": torch.zeros(2, dtype=torch.int64), "slots": torch.zeros(4, dtype=torch.int64)}
    target = {kind: torch.zeros_like(tensor) for kind, tensor in source.items()}
    endpoint = connected(rank, source, target)
    prepared, peer = counted(endpoint), 1 - rank.rank
    for value in range(1, 9):
        source["counter"][1], source["slots"][value % 4] = value, 10 * value
        rank.exchange()
        slot = (Run(value % 4, 3, 1),)
        report = endpoint.read([Read(peer, "counter", (Run(1, 0, 1),)), Read(peer, "slots", slot)], soon(5))
        assert (report.bytes, [each.bytes for each in report.peers]) == (16, [16])
        assert (int(target["counter"][0]), int(target["slots"][3])) == (value, 10 * value)
        rank.exchange()
    assert prepared == ["counter, slots"] * 4, "one for each slot, with both kinds in it"
    leave(rank, endpoint)
    return True


def connect_without_flush(rank: Rank) -> bool:
    from liver_core.transport import nixl

    def refuse(device: torch.device) -> None:
        raise RuntimeError("cuFlushGPUDirectRDMAWrites: CUDA driver error 801")

    nixl.flush_landed = refuse
    with pytest.raises(TransportError, match="driver error 801"):
        connected(rank, {"master": numbers(rank.rank)}, {"master": torch.zeros(NUMEL)})
    rank.exchange()
    return True


def look_at_many_places(rank: Rank) -> bool:
    target = torch.zeros(NUMEL)
    endpoint = connected(rank, {"master": numbers(rank.rank)}, {"master": target})
    assert isinstance(endpoint, NixlTransport)
    for place in range(2 * KEPT_READS_MAX):
        endpoint.read([Read(1 - rank.rank, "master", (Run(place, place, 1),))], soon(5))
    assert same_bits(target[: 2 * KEPT_READS_MAX], numbers(1 - rank.rank)[: 2 * KEPT_READS_MAX])
    before = set(endpoint._kept)
    assert len(before) == KEPT_READS_MAX
    endpoint.read([Read(1 - rank.rank, "master", (Run(0, 0, NUMEL),))], soon(5))
    assert set(endpoint._kept) == before
    leave(rank, endpoint)
    return True


def look_at_one_that_is_gone(rank: Rank) -> bool:
    endpoint = connected(rank, {"master": numbers(rank.rank)}, {"master": torch.zeros(NUMEL)})
    assert isinstance(endpoint, NixlTransport)
    look = [Read(1, "master", (Run(0, 0, 1),))]
    if rank.rank == 0:
        endpoint.read(look, soon(5))
    rank.exchange()
    if rank.rank == 1:
        rank.die()
    rank.exchange()
    for _ in range(3):
        with pytest.raises(TransportError):
            endpoint.read(look, soon(5))
        assert not endpoint._kept
    return True


def connect_over_tcp(rank: Rank) -> bool:
    endpoint = rank.endpoint()
    endpoint.register(sources={"master": numbers(rank.rank)})
    endpoint.start_progress()
    addresses = rank.exchange(endpoint.address())
    if rank.rank == 0:
        with pytest.raises(TransportError):
            endpoint.connect(1, addresses[1] or b"", soon(20))
    # The source is still there to answer.
    rank.exchange()
    leave(rank, endpoint)
    return True


def connect_with_a_wrong_token(rank: Rank) -> bool:
    endpoint = rank.endpoint()
    endpoint.register(sources={"master": numbers(rank.rank)})
    endpoint.start_progress()
    address = json.loads(rank.exchange(endpoint.address())[1 - rank.rank] or b"")
    address["extra"]["token"] = "AAAA"
    with pytest.raises(TransportError, match="not who the address says"):
        endpoint.connect(1 - rank.rank, json.dumps(address).encode(), soon(5))
    leave(rank, endpoint)
    return True


def connect_to_another_machine(rank: Rank) -> bool:
    return refused(rank, "machine", "another boot", "another machine")


def connect_to_another_machine_with_devices(rank: Rank) -> bool:
    endpoint = NixlTransport(f"devices{rank.rank}", Ucx("lo", host_memory_only=False))
    rank.endpoints.append(endpoint)
    target = torch.zeros(NUMEL)
    endpoint.register(sources={"master": numbers(rank.rank)}, targets={"master": target})
    endpoint.start_progress()
    address = json.loads(rank.exchange(endpoint.address())[1 - rank.rank] or b"")
    address["extra"]["machine"] = "another boot"
    endpoint.connect(1 - rank.rank, json.dumps(address).encode(), soon(20))
    endpoint.read([Read(1 - rank.rank, "master", (Run(0, 0, NUMEL),))], soon(10))
    assert same_bits(target, numbers(1 - rank.rank))
    leave(rank, endpoint)
    return True


def connect_to_a_stranger(rank: Rank) -> bool:
    return refused(rank, "token_at", 4096, "cross-memory attach: Bad address")


def refused(rank: Rank, name: str, value: object, why: str, *, endpoint: Transport | None = None) -> bool:
    endpoint = endpoint or rank.endpoint()
    endpoint.register(sources={"master": numbers(rank.rank)})
    endpoint.start_progress()
    address = json.loads(rank.exchange(endpoint.address())[1 - rank.rank] or b"")
    address["extra"][name] = value
    with pytest.raises(TransportError, match=why):
        endpoint.connect(1 - rank.rank, json.dumps(address).encode(), soon(5))
    leave(rank, endpoint)
    return True


def listening_addresses(rank: Rank) -> list[str]:
    endpoint = rank.endpoint()
    endpoint.start_progress()
    inodes = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd.isdigit() and _is_open(fd)}
    found = []
    with open("/proc/net/tcp") as table:
        for line in list(table)[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in inodes:
                packed = bytes.fromhex(columns[1].split(":")[0])
                found.append(".".join(str(byte) for byte in reversed(packed)))
    endpoint.close()
    return sorted(set(found))


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")
