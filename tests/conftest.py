"""Options of the whole test suite, and the corpus that real ranks train on."""

import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from tests import tiers

pytest_plugins = ["tests.durations"]

# How long an example takes says more of the machine that runs it than of the example.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("here")
# Every process that runs Megatron on a CPU sets it; here it halves what collecting the tests takes.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the output of scenario files anew")
    parser.addoption("--thorough", action="store_true", help="run what is marked thorough as well")


def pytest_configure(config: pytest.Config) -> None:
    for subject in tiers.SUBJECTS:
        config.addinivalue_line("markers", f"{subject.name}: its subject; follows from its folder (tests/tiers.py)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        subject = tiers.subject_of(item.path.relative_to(config.rootpath).as_posix())
        item.add_marker(subject)
        if subject in tiers.THOROUGH_SUBJECTS:
            item.add_marker("thorough")
    if not config.getoption("--thorough"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Real ranks are forks of the process that runs the tests: a handler that one test leaves behind in it ends the
    processes of another test otherwise than they end in a job."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    found = yield
    changed = {number: handler for number, handler in before.items() if signal.getsignal(number) != handler}
    for number, handler in changed.items():
        signal.signal(number, handler)
    assert not changed, f"the test has changed what {[number.name for number in changed]} does to this process"
    return found


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a small indexed dataset, built once a session. Who trains on it shares runs that nothing disturbs."""
    from tests.cluster.real_ranks_model import build_corpus
    from tests.liver_core.rank.support import undisturbed_runs

    folder = tmp_path_factory.getbasetemp()
    # Processes of xdist have a folder each, all of them in one.
    undisturbed_runs.keep_in((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "undisturbed")
    return build_corpus(tmp_path_factory.mktemp("corpus"))
