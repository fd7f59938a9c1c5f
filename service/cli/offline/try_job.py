"""`liver jobs try`: build and step a job on this machine, and say what is missing before it goes to a cluster.

Here are the checks that need no torch, and the table. Everything else is found by a child process of an interpreter
that has torch (liver_core.trial.trial_command), which says a finding a line.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from liver_core.installation import install_command
from service.cli.client import AsJson, fail
from service.cli.output import print_json, seconds, size, terminal_width
from service.cli.pages import page

if TYPE_CHECKING:
    from agent.protocol.jobfile import JobFile

EXAMPLE = "Example: liver jobs try job.yaml --layout TP2xPP2"
CHILD = "liver_core.trial.trial_command"
NEEDED = ("torch", "megatron.core", "liver_core.trial")
NAME_CHARS, RESULT_CHARS = 15, 8
_LOOK_FOR = """
import importlib.util, sys
def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
print(",".join(name for name in sys.argv[1:] if not there(name)))
"""
SLOTS_TRIED = (4, 16, 64, 256)
"""Layouts of at most so many ranks; of more only where experts are cut so often that there are no others."""
_COLOURS = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "missing": typer.colors.RED}
Finding = dict[str, Any]


def try_job(
    job_file: Annotated[
        Path, typer.Argument(help=f"Job file in YAML or JSON; see {page('job-file.md')}.", metavar="FILE")
    ],
    *,
    steps: Annotated[int, typer.Option(min=2, max=1_000, help="Steps to train, in each of three runs.")] = 4,
    layout: Annotated[
        str | None,
        typer.Option(
            help="Run the job in this layout as well, with one process a rank, and compare. TP1 runs no other one.",
            show_default="of those allowed the one with most axes that fits this machine",
        ),
    ] = None,
    workdir: Annotated[
        Path | None, typer.Option(help="Where the job's code is on this machine, instead of workdir.", metavar="DIR")
    ] = None,
    python: Annotated[
        str, typer.Option(help="An interpreter that has torch and LiveR.", metavar="PATH", show_default="this one")
    ] = sys.executable,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=1.0, max=86_400.0, help="Seconds for all of it.")
    ] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Build and step a job on this machine, without service and agents, and say what is missing.

    Each check says ok, warning or missing, with the rule and what to change. The status is 1 when something is missing.
    What the job prints goes to standard error.
    """
    trial = _Trial(show=_ignore if as_json else _print_finding)
    job = trial.read(job_file)
    if job is not None and trial.looks_right(job, workdir, layout) and trial.has_torch(python):
        trial.run_child(job, workdir or (Path(job.workdir) if job.workdir else None), layout, steps, python, timeout_s)
    if as_json:
        print_json({"ready": trial.ready, "findings": trial.findings, **trial.numbers})
    else:
        typer.echo(trial.summary())
    if not trial.ready:
        raise typer.Exit(1)


def lacking(python: str, needed: Sequence[str]) -> str:
    """What of these modules the interpreter lacks, as a sentence. Empty if it has them all. Raises OSError and
    SubprocessError if it does not run."""
    done = subprocess.run([python, "-c", _LOOK_FOR, *needed], capture_output=True, text=True, timeout=60, check=True)
    if not (lacks := done.stdout.strip()):
        return ""
    return (
        f"{python} has no {lacks.replace(',', ', ')}: install it with {install_command('core')}, "
        "or name an interpreter that has it with --python"
    )


def layouts_to_try(job: "JobFile") -> list[str]:
    """Those that the job file names; where it only says how experts may be cut, those of few ranks that it allows.
    Empty: the usual ones."""
    from service.planner.feasibility import candidates

    named = [*job.layouts.allowed, *dict.fromkeys(pinned.layout for pinned in job.layouts.pinned)]
    limits = job.layouts.limits
    if named or not (limits.expert_model_parallel or limits.expert_tensor_parallel):
        return named
    found = (candidates(job, nodes=1, slots=slots, history=()) for slots in SLOTS_TRIED)
    return next(([str(layout) for layout in each] for each in found if each), [])


class _Trial:
    """The findings so far, in order; `show` is given each at once."""

    def __init__(self, show: Callable[[Finding], None]) -> None:
        self._show = show
        self.findings: list[Finding] = []
        self.numbers: dict[str, Any] = {}

    @property
    def ready(self) -> bool:
        """Whether nothing is missing."""
        return not any(found["result"] == "missing" for found in self.findings)

    def add(self, check: str, result: str, text: str, details: str = "") -> None:
        """One finding of this process."""
        self._take({"check": check, "result": result, "text": text, "details": details, "values": {}})

    def read(self, path: Path) -> "JobFile | None":
        """The job file, or nothing where a field breaks a rule."""
        from agent.protocol.jobfile_check import JobFileError, check_job_file
        from service.jobs.job_yaml import read_fields

        try:
            job = check_job_file(read_fields(path.read_bytes()))
        except OSError as error:
            self.add("job file", "missing", f"{path}: {error.strerror}")
        except JobFileError as error:
            for problem in error.problems:
                self.add("job file", "missing", f"{problem.field}: {problem.rule}")
        else:
            self.add("job file", "ok", f"{path}: every field keeps its rule")
            return job
        return None

    def looks_right(self, job: "JobFile", workdir: Path | None, layout: str | None) -> bool:
        """What the service would refuse, and what is missing on this machine."""
        from liver_core.layout import LayoutError, ParallelLayout
        from service.planner.feasibility import rule_violations

        for item in rule_violations(job):
            self.add("layout rules", "missing", f"{item.field}: {item.rule}")
        try:
            ParallelLayout.parse(layout or "TP1")
        except LayoutError as error:
            self.add("--layout", "missing", str(error))
        given = "--workdir" if workdir is not None else "workdir"
        folder = workdir or (Path(job.workdir) if job.workdir else None)
        if folder is not None and not folder.is_dir():
            text = "is not a folder" if folder.exists() else "does not exist"
            self.add("workdir", "missing", f"{given}: {folder} {text} on this machine; --workdir names another place")
        elif job.workdir and not Path(job.workdir).is_absolute():
            self.add(
                "workdir", "warning", f"workdir: {job.workdir} must be a whole path on nodes, it begins at the agent's"
            )
        elif folder is not None:
            self.add("workdir", "ok", f"{folder}")
        return self.ready

    def has_torch(self, python: str) -> bool:
        """Whether the interpreter has what a rank needs."""
        try:
            lacks = lacking(python, NEEDED)
        except (OSError, subprocess.SubprocessError) as error:
            self.add("torch", "missing", f"--python: {python} does not run: {error}")
            return False
        if lacks:
            self.add("torch", "missing", lacks)
        return not lacks

    def run_child(
        self, job: "JobFile", workdir: Path | None, layout: str | None, steps: int, python: str, timeout_s: float
    ) -> None:
        """Everything that needs torch."""
        from agent.protocol.secret_values import SecretError, SecretPlaces, environment_of

        try:
            # Whoever tries a job may read here what its job file may name.
            environment = environment_of(job, SecretPlaces((Path("/"),), ("*",)), os.environ)
        except SecretError as error:
            return self.add("environment", "missing", str(error))
        folder = None if workdir is None else str(workdir.resolve())
        plan = {
            "entrypoint": job.entrypoint,
            "args": job.job_args(),
            "global_batch": job.global_batch,
            "micro_batch": job.micro_batch,
            "seed": job.seed,
            "workdir": folder,
            "layouts": layouts_to_try(job),
            "layout": layout or "",
            "steps": steps,
            "start_from": job.start_from,
            "validates": job.validate_every_steps is not None,
            "drop_every": job.drop_step.every_micro_batches if job.drop_step else None,
            "timeout_s": timeout_s,
        }
        started = ""
        # Without -P the job's folder would come before LiveR on the path; on a node it does not.
        with _child([python, "-P", "-m", CHILD], plan, {**os.environ, **environment}, folder, timeout_s) as child:
            for line in child.lines():
                started = line.get("started", "") if "started" in line or "check" in line else started
                if "check" in line:
                    self._take(line)
                elif "started" not in line:
                    self.numbers |= line
            status = child.wait()
        if child.late:
            self.add(started or "start", "missing", f"not done after {timeout_s:g} s; --timeout gives it more")
        elif "died" in self.numbers or status < 0 or (status and self.ready):
            number = self.numbers.get("died", -status)
            how = signal.strsignal(number) if number > 0 else f"status {status}"
            self.add(started or "start", "missing", f"the process died: {how}")

    def summary(self) -> str:
        """The last line."""
        counted = {kind: sum(found["result"] == kind for found in self.findings) for kind in _COLOURS}
        ran, built = self.numbers.get("ran", ()), self.numbers.get("built", ())
        only_built = ", ".join(layout for layout in built if layout not in ran)
        where = f" in {', '.join(ran)}" + (f", only built in {only_built}" if only_built else "") if ran else ""
        verdict, warnings = f"ready{where}" if self.ready else "not ready", counted["warning"]
        text = f"{verdict}: {counted['ok']} ok, {warnings} warning{'s' * (warnings != 1)}, {counted['missing']} missing"
        if not self.ready:
            later = ", ".join(self.numbers.get("not_made", ()))
            return f"{text}; not looked at yet: {later}" if later else text
        return f"{text}; {seconds(self.numbers.get('step_s'))} a step, {size(self.numbers.get('state_bytes'))} of state"

    def _take(self, found: Finding) -> None:
        self.findings.append(found)
        self._show(found)


class _Child:
    """The child process; `late` once it was ended for its time."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.late = False

    def wait(self) -> int:
        """Its status, negative for the signal that ended it."""
        return self._process.wait()

    def lines(self) -> Iterator[dict[str, Any]]:
        """What it says, until it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                yield json.loads(line)
            except ValueError:
                sys.stderr.write(line)

    def end(self, *, late: bool = False) -> None:
        """Kill it and all that it started."""
        self.late |= late
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _child(
    command: list[str], plan: dict[str, Any], environment: dict[str, str], folder: str | None, timeout_s: float
) -> Iterator[_Child]:
    """A child in a session of its own, given the plan; none of it outlives the block."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
    except OSError as error:
        fail(f"{command[0]}: {error.strerror}")
    child = _Child(process)
    timer = threading.Timer(timeout_s, child.end, kwargs={"late": True})
    timer.start()
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(json.dumps(plan))
        yield child
    finally:
        timer.cancel()
        child.end()
        process.wait()


def _ignore(found: Finding) -> None:
    """Nothing is printed before all is known."""


def _print_finding(found: Finding) -> None:
    """Check, result, text; a traceback follows as it is. Wrapped on a terminal, with tabs between in a pipe."""
    width = terminal_width()
    if width is None:
        typer.echo("\t".join((found["check"], found["result"], found["text"])))
    else:
        result = f"{found['result']:<{RESULT_CHARS}}"
        if not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
            result = typer.style(result, fg=_COLOURS[found["result"]])
        indent = NAME_CHARS + RESULT_CHARS + 2
        lines = textwrap.wrap(found["text"], max(40, width - indent), break_on_hyphens=False) or [""]
        typer.echo(f"{found['check']:<{NAME_CHARS}} {result} " + f"\n{' ' * indent}".join(lines))
    if found["details"]:
        typer.echo(textwrap.indent(found["details"].rstrip(), "    "))
