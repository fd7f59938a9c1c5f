"""What the report of the wire benchmark makes of what was measured. Pure."""

from types import SimpleNamespace

import pytest

from tests.benchmarks.wire_report import Stretch, case, line, most_sent, targets

NAMED = {
    "gbps": 10.0,
    "delay_ms": 0.0,
    "loss": 0.0,
    "overtaking": 0.0,
    "change": "move",
    "size": "64MB",
    "iperf_gbps": 8.0,
}
MEASURED = {
    "stream_bytes_per_s": 0.9e9,
    "copied_s": 0.2,
    "bytes_moved": 48e6,
    "bytes_reread": 0.0,
    "bytes_replayed": 32e6,
    "bytes_lower_bound": 48e6,
    "gradient_bytes_at_cutover": 2e8,
    "targets": 2,
    "rung_taken": "live",
    "rung_reason": None,
    "pause_s": 0.1,
    "step_s": 1.0,
    "lost_s": 0.5,
    "open_to_boundary_s": 9.0,
    "torn_reads": 0.0,
    "step_time_ratio_streaming": 1.01,
}
SEEN = SimpleNamespace(
    sent={"a": [(0.1 * at, 90_000_000 * at) for at in range(8)]},
    cpu_s={"relays": [(0.1 * at, 0.01 * at) for at in range(9)], "sources": [], "targets": [(0.0, 0.0), (0.5, 1.0)]},
    load_average=1.0,
)


def test_a_case_compares_with_the_link_and_with_the_bound():
    made = case(NAMED, "live", MEASURED, SEEN)
    assert made["stream_gbps"] == pytest.approx(7.2) and made["sent_gbps"] == pytest.approx(7.2)
    assert made["pause_bound_s"] == pytest.approx(0.15), "one and a half times 0.1 GB over 1 GB/s"
    assert made["relay_cpu_s_per_gb"] == pytest.approx(1.0)
    assert made["cores_while_streaming"] == pytest.approx({"relays": 0.1, "targets": 2.0})
    assert all(each["met"] for each in targets([made]))
    assert "7.20 and sent 7.20 of 8.00 Gb/s" in line(made)


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"pause_s": 0.2}, "pause over its bound"),
        ({"stream_bytes_per_s": 0.5e9, "copied_s": 5.0}, "iperf3 over what is sent"),
        ({"bytes_reread": 2e6}, "bytes over the bound"),
        ({"step_time_ratio_streaming": 1.2}, "steps beside the stream"),
        ({"rung_taken": "stop_and_copy"}, "live cases that fell to another rung"),
        ({"open_to_boundary_s": 121.0}, "seconds to the boundary"),
    ],
)
def test_each_target_can_be_missed(changes: dict, missed: str):
    made = case(NAMED, "live", MEASURED | changes, SEEN)
    assert [each["target"] for each in targets([made]) if not each["met"]] == [missed]


def test_a_case_that_failed_is_a_missed_target_and_a_line():
    failed = NAMED | {"rung": None, "failed": "why"}
    assert [each["target"] for each in targets([failed]) if not each["met"]] == ["failed cases"]
    assert line(failed) == "10 Gb/s move 64MB: FAILED why"


def test_bytes_that_were_torn_are_not_held_against_the_bound():
    made = case(NAMED, "live", MEASURED | {"bytes_reread": 9e6, "torn_reads": 3.0}, SEEN)
    assert all(each["met"] for each in targets([made]))


def test_the_best_stretch_is_at_least_as_long_as_asked_for():
    samples = [(0.0, 0), (1.0, 0), (2.0, 1_000_000_000), (3.0, 1_000_000_000)]
    assert most_sent(samples, 1.0) == Stretch(8.0, 1.0, 2.0)
    assert most_sent(samples, 2.0) == Stretch(4.0, 1.0, 3.0)
    assert most_sent(samples, 9.0) is None
