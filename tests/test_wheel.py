"""What ships: the wheel is built in a temporary folder and its list of files is read; from a bare clone it is installed
with each of its extras."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from liver_core.installation import DISTRIBUTION

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("liver_core", "agent", "service", "migrations", "deploy")
CONSOLE_SOURCES = "service/console/web/"
"""What the console is built from stays in the repository; what is built of it ships."""
INSTALL_S = 1_500.0
PAGES = re.compile(r"""\bpage\(["']([^"']+)["']\)""")
hatchling_build = pytest.importorskip("hatchling.build")


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> frozenset[str]:
    """Paths of all files in a wheel of this tree, with its console if that is built."""
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("HATCH_BUILD_NO_HOOKS", "true")
        name = hatchling_build.build_wheel(str(folder))
    return files_in(folder / name)


def test_the_wheel_carries_every_file_of_every_package(shipped: frozenset[str]):
    expected = {path for package in PACKAGES for path in files_of(package) if not path.startswith(CONSOLE_SOURCES)}
    missing = expected - shipped
    assert not missing, f"in the tree, but not in the wheel: {sorted(missing)}"


def test_the_wheel_carries_nothing_but_the_packages_and_their_metadata(shipped: frozenset[str]):
    metadata = f"{DISTRIBUTION.replace('-', '_')}-"
    strangers = {path for path in shipped if not path.startswith((*(f"{each}/" for each in PACKAGES), metadata))}
    assert not strangers, f"in the wheel, but of no package: {sorted(strangers)}"


def test_the_wheel_carries_no_sources_of_the_console(shipped: frozenset[str]):
    assert not {path for path in shipped if path.startswith(CONSOLE_SOURCES)}


def test_the_wheel_carries_the_revisions_of_the_schema_and_the_licence(shipped: frozenset[str]):
    assert "migrations/env.py" in shipped
    assert any(path.startswith("migrations/versions/") and path.endswith(".py") for path in shipped)
    assert any(path.endswith("/licenses/LICENSE") for path in shipped)


def test_the_wheel_carries_every_page_that_a_help_text_names(shipped: frozenset[str]):
    calls = {page for path in (ROOT / "service" / "cli").rglob("*.py") for page in PAGES.findall(path.read_text())}
    assert calls and {f"service/docs/{page}" for page in calls} <= shipped


class Try(NamedTuple):
    """A command in an environment, its status, and a pattern of all that it says where that matters."""

    command: str
    status: int = 0
    says: str = ""


JOB = "JOB"
NEEDS = r"{} needs pip install '\./liver_handoff-\S+\.whl\[{}\]' \(.+ not installed\)\n"
NO_SERVICE = "--service-url http://127.0.0.1:9"
EVERYWHERE = (
    Try("liver --help"),
    Try("liver --version", says=r"liver \d\S+\n"),
    Try("liver serve --help"),
    Try("liver demo --help"),
    Try("liver jobs try --help"),
    Try("liver-agent --help"),
    Try("liver-agent --version", says=r"liver-agent \d\S+\n"),
    Try(f"liver nodes list {NO_SERVICE}", 1, r"error: no answer from the service .+\n"),
    Try(f"liver jobs submit {JOB} {NO_SERVICE}", 1),
    Try(f"liver plan memory --job {JOB} --from TP1 --to TP2 --device-bytes 80GiB"),
)
NO_SERVE = (
    Try("liver serve", 1, NEEDS.format("error: liver serve", "service")),
    Try(f"liver simulate --trace trace.csv --job {JOB}", 1, NEEDS.format("error: liver simulate", "service")),
)
NO_DEMO = Try("liver demo", 1, NEEDS.format("error: liver demo", "agent,service"))
NO_AGENT = Try("liver-agent --node-id a", 2, NEEDS.format("liver-agent", "agent"))
CORPUS = "python -m liver_core.training.corpus --out corpus/stdlib"
NO_CORE = (
    Try(CORPUS, 1, NEEDS.format("error: python -m liver_core.training.corpus", "core")),
    Try(f"liver jobs try {JOB} --workdir CODE", 1, r"[\s\S]+install it with pip install '\./liver_handoff-[\s\S]+"),
)
CORE = (Try(f"{CORPUS} --bytes-max 100000"), Try(f"liver jobs try {JOB} --workdir CODE --timeout 600"))
STEPS = {
    "service": (("", (*NO_SERVE, NO_DEMO, NO_AGENT, *NO_CORE)), ("service", (NO_DEMO, NO_AGENT, *NO_CORE))),
    "node": (
        ("core", (*NO_SERVE, NO_DEMO, NO_AGENT, *CORE)),
        ("agent", (*NO_SERVE, NO_DEMO, Try("liver-agent --node-id a", 2, r"liver-agent: --service-url is required\n"))),
    ),
}
"""By environment: the extra to install next, and what is tried then. Two are enough, since torch is large."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a bare clone of what is committed here, built as a person builds it."""
    folder = tmp_path_factory.mktemp("clone")
    run("git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", str(folder / "tree"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HATCH_")}
    command.append(str(folder / "tree"))
    built = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    said = built.stdout + built.stderr
    if built.returncode and re.search("ENOTFOUND|ECONNREFUSED|No matching distribution found", said):
        pytest.skip("no registry of PyPI and npm is within reach to build a wheel of a bare clone")
    assert built.returncode == 0, said
    [found] = folder.glob("*.whl")
    return found


@pytest.mark.thorough
@pytest.mark.timeout(INSTALL_S + 60)
def test_the_wheel_of_a_bare_clone_carries_the_console(wheel: Path):
    built = {path for path in files_in(wheel) if path.startswith("service/console/static/app/")}
    assert "service/console/static/app/index.html" in built
    assert any(path.endswith(".js") for path in built)


@pytest.mark.thorough
@pytest.mark.timeout(4 * INSTALL_S)
@pytest.mark.parametrize("name", STEPS)
def test_each_extra_is_whole_and_what_lacks_one_says_so_in_one_line(wheel: Path, tmp_path: Path, name: str):
    place = tmp_path / "environment"
    run(sys.executable, "-m", "venv", str(place))
    for extra, tries in STEPS[name]:
        wanted = f"{wheel}[{extra}]" if extra else str(wheel)
        pip = (str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*pip, "--constraint", str(ROOT / "constraints.txt"), wanted)
        for each in (*EVERYWHERE, *tries):
            check(each, place, tmp_path, extra)
    if name == "service":
        no_folder = Try("liver serve --port 0 --data-dir /proc/none", 1, r"(.*\n)*error: data directory .+\n")
        check(no_folder, place, tmp_path, "service")


def check(tried: Try, place: Path, folder: Path, extra: str) -> None:
    code = ROOT / "docs" / "examples"
    words = [{JOB: str(code / "job.yaml"), "CODE": str(code)}.get(word, word) for word in tried.command.split()]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LIVER_", "PYTHON"))}
    environment |= {"LIVER_TOKEN": "liver_a_b", "HOME": str(folder), "COLUMNS": "200"}
    command = [str(place / "bin" / words[0]), *words[1:]]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == tried.status, (extra, tried.command, said)
    assert "Traceback" not in said, (extra, tried.command, said)
    assert not tried.says or re.fullmatch(tried.says, said), (extra, tried.command, said)


def run(*command: str) -> None:
    """Raises with what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    assert done.returncode == 0, (command, done.stdout, done.stderr)


def files_in(wheel: Path) -> frozenset[str]:
    with zipfile.ZipFile(wheel) as opened:
        return frozenset(opened.namelist())


def files_of(package: str) -> set[str]:
    made_by_tools = {"__pycache__", "node_modules"}
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / package).rglob("*")
        if path.is_file() and not made_by_tools & set(path.parts) and not path.name.startswith(".")
    }
