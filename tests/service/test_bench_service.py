"""`make bench-service` at a size of seconds: the report has its whole form, and all reports of all agents are taken."""

import json

import pytest

from tests.benchmarks.service import main

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.real,
    pytest.mark.timeout(300),
]  # It starts two services, one after the other.

CASE = {
    "agents", "jobs", "ranks_per_node", "hz", "sync_ms", "wake_ms", "notice_to_order_ms", "notices_without_order",
    "cpu_ms_per_agent_period", "statements_per_sync", "rss_mb", "wal_bytes_per_sync", "syncs_per_s", "answer_bytes",
    "not_taken", "start_up", "generator_late_ms",
}  # fmt: skip


def test_the_benchmark_of_the_service_measures_what_it_is_to_measure(tmp_path):
    path = tmp_path / "service.json"
    size = ["--agents", "8", "--large", "8", "--period", "0.5", "--seconds", "1", "--trials", "2"]
    assert main([*size, "--intervals", "1000", "--report", str(path)]) == 0
    report = json.loads(path.read_text())
    (small,), (large,) = report["cases"], report["one_large_job"]
    assert small.keys() == CASE
    assert large.keys() == CASE | {"cost_of_a_small_job"}
    assert (small["agents"], small["jobs"], large["agents"], large["jobs"]) == (8, 2, 8, 1)
    for case in (small, large):
        assert case["not_taken"] == {}
        assert case["notices_without_order"] == 0
        for times in (case["sync_ms"], case["notice_to_order_ms"]):
            assert 0 < times["p50"] <= times["p99"]
        assert case["wake_ms"] > 0
        assert case["start_up"]["join"]["service_cpu_s"] > 0
        assert case["statements_per_sync"] > 1
        assert case["wal_bytes_per_sync"] > 0
    assert report["ledger"][0]["intervals"] == 1_000
    assert report["ledger"][0]["query_ms"] > 0
    assert report["readers"].keys() == {
        "requests_per_s",
        "refused",
        "agents_p99_ratio",
        "agents_p99_ms",
        "generator_late_p99_ms",
    }
