"""When reads over EFA are tried, and each reason why they are refused. None of it needs such a device."""

from __future__ import annotations

import _ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from liver_core.transport import efa, efa_check
from liver_core.transport.efa import ENVIRONMENT, Efa, efa_devices, why_failed, why_not_here
from liver_core.transport.nixl import NixlTransport
from liver_core.transport.nixl_library import loaded_libraries
from liver_core.transport.profile import PROGRESS_PERIOD_S
from liver_core.transport.protocol import Call, TransportError, WayLost
from liver_core.transport.regions import Address
from tests.liver_core.transport.test_contract import soon

DEVICES = {"rdmap16s27": "0xefa2"}
WHEELS = Path(importlib.util.find_spec("nixl").origin or "").parent.parent  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    why_not_here.cache_clear()
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)


def test_efa_devices_are_those_of_amazon_with_their_generation(tmp_path: Path):
    assert efa_devices(tmp_path) == {} == efa_devices(tmp_path / "missing")
    for name, vendor, device in (
        ("rdmap16s27", "0x1d0f", "0xefa2"),
        ("mlx5_0", "0x15b3", "0x101e"),
        ("efa_0", "0x1d0f", "0xefa0"),
    ):
        (tmp_path / name / "device").mkdir(parents=True)
        (tmp_path / name / "device/vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "device/device").write_text(f"{device}\n")
    (tmp_path / "rxe0").mkdir()
    assert efa_devices(tmp_path) == {"efa_0": "0xefa0", "rdmap16s27": "0xefa2"}


def test_libfabric_is_told_to_use_efa_alone_and_to_emulate_no_read():
    settings = Efa(DEVICES).environment()
    assert (settings["FI_PROVIDER"], settings["FI_EFA_USE_DEVICE_RDMA"]) == ("efa", "1")
    assert settings["FI_EFA_ENABLE_SHM_TRANSFER"] == "0", "libfabric may emulate reads over shared memory"


@pytest.mark.parametrize(("name", "value"), [("FI_PROVIDER", "tcp"), ("FI_EFA_USE_DEVICE_RDMA", "0")])
def test_a_setting_of_the_job_that_lets_libfabric_emulate_reads_is_refused_by_name(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(efa, "why_failed", lambda *_: pytest.fail("no need to look further"))
    with pytest.raises(TransportError, match=f"{name} is '{value}' in the environment, .* unset it"):
        Efa(DEVICES).check_here()


def test_a_machine_is_checked_once(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def fails(command: list[str], environment: dict[str, str]) -> str:
        asked.append(environment["FI_PROVIDER"])
        return "no driver"

    monkeypatch.setattr(efa, "why_failed", fails)
    for _ in range(3):
        endpoint = NixlTransport("one", Efa(DEVICES))
        with pytest.raises(TransportError, match="no driver"):
            endpoint.register(sources={"master": torch.zeros(8)})
        endpoint.close()
    assert asked == ["efa"]
    assert "FI_PROVIDER" not in os.environ, "it is for those that can use it"


def test_without_a_device_nothing_is_started(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(efa, "why_not_here", lambda: pytest.fail("it was checked"))
    with pytest.raises(TransportError, match="this machine has no EFA device"):
        Efa({}).check_here()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (f"print('{efa_check.OK}')", ""),
        ("print('noise'); print('no provider')", "no provider"),
        (
            "import os, sys; print('EFA device has no rdma-read capability.', file=sys.stderr, flush=True); os.abort()",
            "cannot read the memory of another machine by itself",
        ),
        ("import os, sys; print('why', file=sys.stderr, flush=True); os.abort()", "ended with status -6: why"),
    ],
)
def test_what_a_check_says_or_how_it_ends_is_the_reason(script: str, why: str):
    said = why_failed([sys.executable, "-c", script], os.environ)
    assert said == "" if not why else why in said


def test_a_check_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(efa, "CHECK_S", 0.2)
    assert "timed out" in why_failed([sys.executable, "-c", "import threading; threading.Event().wait()"], os.environ)


def peer(devices: list[str]) -> Address:
    return Address(Efa.kind, "peer", {}, {"efa": devices})


def test_the_first_generation_of_efa_and_later_ones_do_not_read_each_other():
    first, later = Efa({"efa_0": "0xefa0"}), Efa(DEVICES)
    first.check_peer(0, peer(["0xefa0"]))
    later.check_peer(0, peer(["0xefa1"]))
    for profile, theirs in ((first, "0xefa2"), (later, "0xefa0")):
        with pytest.raises(TransportError, match=f"first generation .* 'peer' has {theirs}"):
            profile.check_peer(0, peer([theirs]))
    with pytest.raises(TransportError, match="names no EFA devices"):
        later.check_peer(0, Address(Efa.kind, "peer", {}))


class Source:
    """Answers emulated reads when it polls, once in a period; others at once."""

    def __init__(self, emulated: Callable[[int], bool]) -> None:
        self.now, self.reads = 0.0, 0
        self._emulated = emulated

    def read(self) -> None:
        self.reads += 1
        if self._emulated(self.reads):
            self.now = (self.now // PROGRESS_PERIOD_S + 1) * PROGRESS_PERIOD_S
        self.now += 0.00004


def proved(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efa, "_answered", lambda peer, read, deadline: read())
    monkeypatch.setattr(efa.time, "monotonic", lambda: source.now)
    Efa(DEVICES).prove(3, source.read, 10.0)


def test_reads_that_come_faster_than_the_source_polls_prove_themselves(monkeypatch: pytest.MonkeyPatch):
    proved(Source(lambda _: False), monkeypatch)
    wired_up = Source(lambda read: read <= 32)
    proved(wired_up, monkeypatch)
    assert wired_up.reads < 64


def test_reads_that_wait_for_the_source_to_poll_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(TransportError, match="libfabric may emulate them") as refused:
        proved(Source(lambda _: True), monkeypatch)
    assert refused.value.peer == 3


def test_a_peer_that_never_answers_costs_a_bounded_time_and_the_way():
    never = threading.Event()

    def wait() -> None:
        never.wait(30.0)

    start = time.monotonic()
    with pytest.raises(WayLost, match="security group"):
        Efa(DEVICES).prove(3, wait, start + 0.1)
    never.set()
    assert time.monotonic() - start < 5.0


def test_a_first_read_that_fails_says_why():
    def fail() -> None:
        raise TransportError(Call.CONNECT, "the read failed", peer=3)

    with pytest.raises(TransportError, match="the read failed"):
        Efa(DEVICES).prove(3, fail, soon())


def test_nixls_plugin_is_looked_for_where_nixl_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    libraries = ["/lib/libc.so.6", str(tmp_path / "libnixl_common.so"), str(tmp_path / "libnixl.so")]
    assert efa_check.plugin_of(libraries) is None
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/libplugin_LIBFABRIC.so").touch()
    assert efa_check.plugin_of(libraries) == tmp_path / "plugins/libplugin_LIBFABRIC.so"
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path / "other"))
    assert efa_check.plugin_of(libraries) is None


LOAD = (
    "import sys; from pathlib import Path; from liver_core.transport.efa_check import why_not_loaded\n"
    "print(why_not_loaded(Path(sys.argv[1])))\n"
)


def why_not_loaded(plugin: Path, *stand_ins: str, folder: Path) -> str:
    """What is said of the real plugin where only these of the libraries that it needs are to be found: others under
    their names. That of libfabric has versions of its own, the loader takes the rest for old ones that have none."""
    libc = next(path for path in loaded_libraries() if path.endswith("/libc.so.6"))
    for name in stand_ins:
        shutil.copy(libc if name == "libfabric.so.1" else _ctypes.__file__, folder / name)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    command = [sys.executable, "-c", LOAD, str(plugin)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def real_plugin() -> Path:
    found = sorted(WHEELS.glob(".nixl_cu12*.libs/plugins/libplugin_LIBFABRIC.so"))
    assert found, "NIXL's wheel has no plugin for libfabric any more"
    return found[0]


@pytest.mark.real
@pytest.mark.skipif(os.path.exists("/opt/amazon/efa"), reason="the libraries that this test misses are installed")
def test_the_library_that_nixls_plugin_misses_is_named_with_the_remedy(tmp_path: Path):
    plugin, others = real_plugin(), ("libcudart.so.12", "libhwloc.so.15")
    assert "libfabric.so.1: cannot open" in (said := why_not_loaded(plugin, folder=tmp_path))
    assert "install AWS's EFA installer 1.51.0 or newer" in said
    said = why_not_loaded(plugin, "libfabric.so.1", *others, folder=tmp_path)
    assert "libcuda.so.1: cannot open" in said and "install NVIDIA's driver" in said
    said = why_not_loaded(plugin, "libfabric.so.1", "libcuda.so.1", *others, folder=tmp_path)
    assert "libfabric.so.1: version `FABRIC_1." in said and "(libfabric 2.7)" in said


@pytest.mark.real
@pytest.mark.skipif(os.path.exists("/opt/amazon/efa"), reason="libfabric is installed")
def test_the_whole_check_ends_with_a_reason_on_a_machine_without_libfabric():
    assert why_not_here().startswith("NIXL's plugin for libfabric does not load: lib")


class Libfabric:
    """Answers with a status."""

    class _Text:
        restype: Any = None

        def __call__(self, number: int) -> bytes:
            return b"No data available" if number == 61 else b"?"

    def __init__(self, status: int) -> None:
        self.fi_strerror = self._Text()
        self.fi_getinfo = lambda *_: status


def test_a_libfabric_without_a_device_for_its_provider_is_refused():
    assert efa_check.why_no_provider(Libfabric(0)) == ""
    said = efa_check.why_no_provider(Libfabric(-61))
    assert "provider efa (No data available)" in said and "/dev/infiniband" in said


class Api:
    """NIXL whose agent has these backends, or cannot be made."""

    def __init__(self, backends: list[str], error: Exception | None = None) -> None:
        self.backends, self._error = backends, error

    def nixl_agent_config(self, **settings: Any) -> dict[str, Any]:
        return settings

    def nixl_agent(self, name: str, config: dict[str, Any]) -> Api:
        assert config["backends"] == [Efa.backend] and not config["enable_prog_thread"]
        if self._error:
            raise self._error
        return self


def test_an_agent_that_cannot_be_made_is_refused_with_the_limit_on_locked_memory(monkeypatch: pytest.MonkeyPatch):
    assert efa_check.why_no_agent(Api(["LIBFABRIC"])) == ""
    assert "no backend for libfabric" in efa_check.why_no_agent(Api([]))
    broken = Api([], RuntimeError("NIXL_ERR_BACKEND"))
    monkeypatch.setattr(efa_check.resource, "getrlimit", lambda _: (65536, 65536))
    assert "NIXL_ERR_BACKEND" in (said := efa_check.why_no_agent(broken)) and "ulimit -l unlimited" in said
    monkeypatch.setattr(efa_check.resource, "getrlimit", lambda _: (efa_check.resource.RLIM_INFINITY,) * 2)
    assert "ulimit" not in efa_check.why_no_agent(broken)


class Quiet:
    """An agent whose reads never return from the call that starts them."""

    def __init__(self) -> None:
        self.released, self.closed = threading.Event(), False

    def register(self, *_: Any) -> None:
        return

    def add_peer(self, peer: int, metadata: bytes) -> str:
        return "peer"

    def metadata(self) -> bytes:
        return b"here"

    def post(self, *_: Any) -> None:
        self.released.wait(30.0)
        raise TransportError(Call.CONNECT, "late")

    def close(self) -> None:
        self.closed = True


def test_an_endpoint_leaves_an_agent_alone_whose_call_has_not_returned_and_serves_on(monkeypatch: pytest.MonkeyPatch):
    agents: dict[str, Quiet] = {}

    def agent(_: NixlTransport, name: str) -> Any:
        return agents.setdefault(name, Quiet())

    monkeypatch.setattr(NixlTransport, "_agent", agent)
    endpoint = NixlTransport("one", Efa(DEVICES))
    endpoint.register(sources={"master": torch.zeros(8)})
    address = endpoint.address()
    assert json.loads(address)["extra"]["efa"] == ["0xefa2"]
    with pytest.raises(WayLost):
        endpoint.connect(1, address, time.monotonic() + 0.1)
    assert not agents["targets"].closed, "it would wait for the call"
    with pytest.raises(TransportError, match="reads no more"):
        endpoint.connect(1, address, soon())
    agents["targets"].released.set()
    endpoint.close()
    assert agents["sources"].closed
