"""The benchmark of streaming on one device, on its CPU path: it measures, and what it checks holds."""

import json
from pathlib import Path

import pytest

from tests.benchmarks import device_stream

pytestmark = pytest.mark.real


def test_two_processes_stream_state_and_every_bit_is_equal(tmp_path: Path):
    report = tmp_path / "report.json"
    assert device_stream.main(["--device", "cpu", "--sizes", "12MB", "--report", str(report)]) == 0
    found = json.loads(report.read_text())
    edges, (case,) = found["edges"], found["cases"]
    assert edges["mixed"] == 0
    assert edges["whole"] > 0 and edges["torn"] > 0, "neither is a proof without the other"
    assert case["equal"] and case["state_bytes"] == 12_000_000
    assert case["replays"] >= 1 and case["gradient_bytes"] == 4_000_000
    assert case["share_of_copy"] > 0 and 0 < case["pause_ms"] < 10_000


@pytest.mark.parametrize(
    ("arguments", "says"), [(["--sizes", "many"], "--sizes: size 'many'"), (["--device", "tpu"], "invalid choice")]
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        device_stream.main(arguments)
    assert says in capsys.readouterr().err
