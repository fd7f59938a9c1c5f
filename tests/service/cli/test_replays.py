"""`liver jobs what-if` against a real service: what a person sees, what a program reads, and how it refuses."""

import json
from pathlib import Path

import pytest

from tests.service.cli.conftest import Service
from tests.service.fake_agent import JOB

TRACE = "0,add,a\n0,add,b\n0,add,c\n600000,remove,b\n1200000,add,d\n"


@pytest.mark.thorough
def test_a_person_asks_what_a_job_would_have_done_on_a_trace_and_a_program_reads_the_same(
    service: Service, tmp_path: Path
):
    job_file = tmp_path / "job.json"
    job_file.write_text(json.dumps(JOB))
    job_id = service.run("jobs", "submit", str(job_file)).stdout.strip()
    trace = tmp_path / "p3.csv"
    trace.write_text(TRACE)
    asked = ("jobs", "what-if", job_id, "--trace", str(trace), "--change", "2", "--slots", "2")
    seen = service.run(*asked)
    assert seen.exit_code == 0, seen.output
    assert "p3.csv, 0.3 hours, at most 3 nodes" in seen.stdout and "checkpoint restart" in seen.stdout
    found = json.loads(service.run(*asked, "--json").stdout)
    assert (found["slots_per_node"], found["lost_s"]) == (2, 2.0)
    assert f"{found['policies'][0]['goodput']:.4f}" in seen.stdout

    assert "enacted" not in seen.stdout
    by_machines = service.run(*asked, "--machines")
    assert by_machines.exit_code == 0, by_machines.output
    assert "start active" in by_machines.stdout and "handoffs refused" in by_machines.stdout

    trace.write_text("0,add,a\n0,add,a\n")
    refused = service.run(*asked)
    assert refused.exit_code == 1 and "trace.text: p3.csv: row 2: a came twice" in refused.stderr
    nothing = service.run("jobs", "what-if", job_id, "--own", "3")
    assert nothing.exit_code == 1 and "builtin: the service had no node in own-3h" in nothing.stderr
    absent = service.run("jobs", "what-if", job_id, "--trace", str(tmp_path / "absent.csv"))
    assert absent.exit_code == 1 and "--trace" in absent.stderr and "cannot be read" in absent.stderr
