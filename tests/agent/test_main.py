"""The command: every wrong setting and every refusal is one clear line and an exit status."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from agent.main import main
from agent.settings import SettingsError, read_token, socket_dir_for
from deploy.local.metadata_server import ImdsServer
from tests.agent.stub_service import TOKEN, StubService
from tests.agent.waiting import fake_job
from tests.tiers import sample

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agent.main", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def options(tmp_path: Path, **changes: str) -> list[str]:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    chosen = {
        "service-url": "http://127.0.0.1:9",
        "token-file": str(token),
        "node-id": "a",
        "run-dir": str(tmp_path / "run"),
        "preload": "json",
    } | {name.replace("_", "-"): value for name, value in changes.items()}
    return [part for name, value in chosen.items() for part in (f"--{name}", value)]


def test_the_help_shows_an_example() -> None:
    shown = run("--help")
    assert shown.returncode == 0
    assert "liver-agent --service-url http" in shown.stdout


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"service_url": ""}, "--service-url is required"),
        ({"service_url": "ftp://x"}, "--service-url 'ftp://x'"),
        ({"token_file": "/nowhere/token"}, "--token-file /nowhere/token cannot be read"),
        ({"node_id": "two words"}, "--node-id 'two words'"),
        ({"pool": "a pool"}, "--pool 'a pool'"),
        ({"slots": "0"}, "--slots must be in 1..1024, is 0"),
        ({"slots": "many"}, "--slots must be a whole number, is 'many'"),
        ({"provider": "azure"}, "--provider must be one of aws, gcp, none, is 'azure'"),
    ],
)
def test_a_wrong_setting_is_named_with_its_rule(tmp_path: Path, changes: dict[str, str], what: str) -> None:
    ended = run(*options(tmp_path, **changes))
    assert ended.returncode == 2
    assert what in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_run_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = run(*options(tmp_path, run_dir=str(tmp_path / "file" / "run")))
    assert ended.returncode == 2
    assert "--run-dir" in ended.stderr


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = run(*options(tmp_path, peer_port=port))
    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in ended.stderr


def test_a_wrong_token_ends_the_agent_with_the_words_of_the_service(tmp_path: Path) -> None:
    service = StubService(fake_job(tmp_path), ("a",)).start()
    wrong = tmp_path / "wrong"
    wrong.write_text("not-the-token")
    try:
        ended = run(*options(tmp_path, service_url=service.url, token_file=str(wrong)))
    finally:
        service.stop()
        run("--stop-ranks", "--run-dir", str(tmp_path / "run"))
    assert ended.returncode == 3
    assert f"{service.url}: the service refuses the token: 401 no such token" in ended.stderr
    assert "imports took" not in ended.stderr, "the token is looked at after seconds of imports only"


@pytest.mark.parametrize("provider", sample(["aws", "none"], "aws"))
def test_systemd_hears_that_the_agent_is_ready_alive_and_stopping(tmp_path: Path, provider: str) -> None:
    service = StubService(fake_job(tmp_path), ("a",)).start()
    metadata = ImdsServer().start()
    command = [sys.executable, "-m", "agent.main", *options(tmp_path, service_url=service.url, provider=provider)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(40)
        environ = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "300000"}
        environ["LIVER_AGENT_AWS_IMDS_URL"] = metadata.url
        agent = subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.DEVNULL)
        try:
            heard = [manager.recv(1_000).decode() for _ in range(3)]
            assert heard == ["READY=1\nSTATUS=watches node a", "WATCHDOG=1", "WATCHDOG=1"]
            agent.terminate()
            assert agent.wait(timeout=30) == 0
            while (said := manager.recv(1_000).decode()) == "WATCHDOG=1":
                pass
            assert said.startswith("STOPPING=1")
        finally:
            agent.kill()
            agent.wait()
            service.stop()
            metadata.stop()
            run("--stop-ranks", "--run-dir", str(tmp_path / "run"))


@pytest.mark.parametrize("device, seen", [("cpu", ""), ("H100", "GPU-a,GPU-b")])
def test_what_trains_on_a_node_for_the_cpu_sees_none_of_its_gpus(tmp_path: Path, device: str, seen: str) -> None:
    """Torch trains on a GPU wherever it sees one."""
    service = StubService(fake_job(tmp_path), ("a",)).start()
    command = [sys.executable, "-m", "agent.main", *options(tmp_path, service_url=service.url, device=device)]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    agent = subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)
    assert agent.stderr is not None
    try:
        [pid] = next(found for line in agent.stderr if (found := re.findall(r"zygote \(pid (\d+)\) is ready", line)))
        assert psutil.Process(int(pid)).environ()["CUDA_VISIBLE_DEVICES"] == seen
    finally:
        agent.kill()
        agent.wait()
        service.stop()
        run("--stop-ranks", "--run-dir", str(tmp_path / "run"))


def test_a_switch_for_the_shutdown_is_on_or_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIVER_AGENT_SHUTDOWN", "maybe")
    assert "LIVER_AGENT_SHUTDOWN must be on or off, is 'maybe'" in run(*options(tmp_path)).stderr


def test_the_version_is_told_without_any_setting() -> None:
    shown = run("--version")
    assert shown.returncode == 0
    assert shown.stdout.startswith("liver-agent ")


def test_without_its_extra_the_agent_says_in_one_line_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("liver_core.installation.is_there", lambda module: module != "dbus_fast")
    assert main(options(tmp_path)) == 2
    told = capsys.readouterr().err
    assert re.fullmatch(r"liver-agent needs pip install '\./\S+\[agent\]' \(dbus_fast is not installed\)\n", told)


def test_stop_ranks_must_say_whose() -> None:
    ended = run("--stop-ranks")
    assert ended.returncode == 2
    assert "--stop-ranks needs --run-dir or --node-id" in ended.stderr


def test_the_agent_process_never_imports_torch() -> None:
    program = (
        "import sys, agent.main, agent.app\n"
        "heavy = {'torch', 'megatron', 'numpy', 'nixl'} & {name.split('.')[0] for name in sys.modules}\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize("text", ["", "  \n", "two words", "t" * 5_000])
def test_a_token_file_holds_exactly_one_token(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(SettingsError, match="must contain one token"):
        read_token(str(path))


def test_sockets_of_a_deep_run_directory_lie_where_their_names_fit(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    found = socket_dir_for(deep)
    assert len(str(found)) < 60
    assert found.stat().st_mode & 0o777 == 0o700
    found.rmdir()
