"""What ships: the wheel is built in a temporary folder and its list of files is read."""

import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("liver_core", "agent", "service", "migrations", "deploy")
CONSOLE_SOURCES = "service/console/web/"
"""What the console is built from stays in the repository; what is built of it ships."""
hatchling_build = pytest.importorskip("hatchling.build")


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> frozenset[str]:
    """Paths of all files in the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        name = hatchling_build.build_wheel(str(folder))
    with zipfile.ZipFile(folder / name) as wheel:
        return frozenset(wheel.namelist())


def test_the_wheel_carries_every_file_of_every_package(shipped: frozenset[str]):
    expected = {path for package in PACKAGES for path in files_of(package) if not path.startswith(CONSOLE_SOURCES)}
    missing = expected - shipped
    assert not missing, f"in the tree, but not in the wheel: {sorted(missing)}"


def test_the_wheel_carries_nothing_but_the_packages_and_their_metadata(shipped: frozenset[str]):
    strangers = {path for path in shipped if not path.startswith((*(f"{each}/" for each in PACKAGES), "liver-"))}
    assert not strangers, f"in the wheel, but of no package: {sorted(strangers)}"


def test_the_wheel_carries_no_sources_of_the_console(shipped: frozenset[str]):
    assert not {path for path in shipped if path.startswith(CONSOLE_SOURCES)}


def test_the_wheel_carries_the_revisions_of_the_schema_and_the_licence(shipped: frozenset[str]):
    assert "migrations/env.py" in shipped
    assert any(path.startswith("migrations/versions/") and path.endswith(".py") for path in shipped)
    assert any(path.endswith("/licenses/LICENSE") for path in shipped)


def files_of(package: str) -> set[str]:
    made_by_tools = {"__pycache__", "node_modules"}
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / package).rglob("*")
        if path.is_file() and not made_by_tools & set(path.parts) and not path.name.startswith(".")
    }
