"""The systemd units and the compose file, checked by systemd itself and by a parser that knows the compose schema."""

import configparser
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from service.settings import ServiceSettings
from tests.debian import needs

compose_spec = pytest.importorskip("compose_spec")
ROOT = Path(__file__).resolve().parents[2]
SYSTEMD = ROOT / "deploy" / "systemd"
COMPOSE = ROOT / "deploy" / "compose" / "compose.yaml"
UNITS = ("liver.service", "liver-agent.service")
GCP_NOTICE_S = 30


def section(unit: str, name: str = "Service") -> dict[str, str]:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parser.read(SYSTEMD / unit)
    return dict(parser[name])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_finds_nothing_wrong_with_the_unit(unit: str, tmp_path: Path) -> None:
    program = needs("systemd-analyze")
    text = (SYSTEMD / unit).read_text()
    for name in re.findall(r"^ExecStart=(/opt/liver/bin/\S+)", text, re.MULTILINE):
        # Its command is installed on the machines of users, not on this one.
        (tmp_path / Path(name).name).write_text("#!/bin/sh\n")
        (tmp_path / Path(name).name).chmod(0o755)
    (tmp_path / unit).write_text(text.replace("/opt/liver/bin/", f"{tmp_path}/"))
    command = [program, "verify", "--man=no", "--recursive-errors=no", str(tmp_path / unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS)
def test_both_say_when_they_are_ready_and_are_restarted_when_they_hang(unit: str) -> None:
    service = section(unit)
    assert (service["Type"], service["Restart"]) == ("notify", "always")
    assert int(service["WatchdogSec"]) > 0 and service["NotifyAccess"] == "main"


def test_an_agent_that_stands_still_is_replaced_while_half_of_the_shortest_notice_of_a_cloud_is_left() -> None:
    service = section("liver-agent.service")
    starts_s = 4
    # By default systemd asks it to end first, and waits for TimeoutStopSec.
    assert service["WatchdogSignal"] == "SIGKILL"
    assert int(service["WatchdogSec"]) + int(service["RestartSec"]) + starts_s <= GCP_NOTICE_S / 2


def test_ranks_outlive_the_agent_and_the_agent_has_the_time_that_logind_and_gcp_leave() -> None:
    service = section("liver-agent.service")
    assert service["KillMode"] == "process"
    logind = section("liver-agent-logind.conf", "Login")
    leaves_s = 25
    assert int(logind["InhibitDelayMaxSec"]) == leaves_s < int(service["TimeoutStopSec"]) <= 30


def test_the_compose_file_is_valid_by_the_compose_specification() -> None:
    """The parser refuses unknown keys and values, see the next test."""
    found = compose_spec.PyCompose.from_yaml(COMPOSE.read_text())
    assert set(found.service_names()) == {"database", "service"}


@pytest.mark.parametrize("wrong", ["imag: x", "restart: sometimes", "ports: 7"])
def test_the_parser_of_compose_files_would_find_a_mistake(wrong: str) -> None:
    with pytest.raises(Exception, match=r"services\.a"):
        compose_spec.PyCompose.from_yaml(f"services:\n  a:\n    {wrong}\n")


def test_the_settings_in_the_compose_file_are_settings_of_the_service() -> None:
    parsed = yaml.safe_load(COMPOSE.read_text())
    given = parsed["services"]["service"]["environment"]
    known = {f"LIVER_SERVICE_{name.upper()}" for name in ServiceSettings.model_fields}
    assert given and set(given) <= known
    assert (ROOT / parsed["services"]["service"]["build"]["dockerfile"]).is_file()
