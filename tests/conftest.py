"""Options of the whole test suite, and the corpus that real ranks train on."""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says more of the machine that runs it than of the example.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("here")
# Every process that runs Megatron on a CPU sets it; here it halves what collecting the tests takes.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the output of scenario files anew")
    parser.addoption("--thorough", action="store_true", help="run what is marked thorough as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--thorough"):
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    if hasattr(config, "workerinput"):
        _longest_files_first(items)


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


def _longest_files_first(items: list[pytest.Item]) -> None:
    """Processes that share the files end at the same time when the last files are short ones. A test's own limit is a
    fair guess at how long its file takes."""
    limits: dict[Path, tuple[float, int]] = {}
    for item in items:
        longest, count = limits.get(item.path, (0.0, 0))
        marker = item.get_closest_marker("timeout")
        limits[item.path] = (max(longest, marker.args[0] if marker else 0.0), count + 1)
    items.sort(key=lambda item: limits[item.path], reverse=True)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a small indexed dataset, built once a session."""
    from tests.cluster.real_ranks_model import build_corpus

    return build_corpus(tmp_path_factory.mktemp("corpus"))
