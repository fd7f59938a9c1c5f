"""Runs one suite of `make test`, and what failed in it once more, alone.

A test that fails beside two others, each with eight processes on the same two cores, may say more of the machine than
of the product. So the few that failed run again, one after the other, with nothing beside them. One that fails again
fails the suite. One that passes is unsteady: the suite passes, but its end names the test, and the report in
build/reports keeps what it printed when it failed. More than a few failures are the product's: none of them is run
again.

    python -m tests.run_suite real -n 3 -m real
"""

import json
import subprocess
import sys
from pathlib import Path

AGAIN_MAX = 6  # As many failures as a busy machine has ever caused in one run, and no more.
AGAIN_LIMIT_S = 900.0
FAILED, NO_TEST = 1, 5  # pytest's exit codes: tests failed; none was chosen.
REPORTS = Path("build/reports")


def main(name: str, arguments: list[str]) -> int:
    """Exit code of the suite: pytest's own, or 0 where each of a few failures passed alone."""
    cache = Path("build/cache") / name
    last_failed = cache / "v/cache/lastfailed"
    last_failed.unlink(missing_ok=True)
    code = _pytest([*arguments, "-o", f"cache_dir={cache}"]).returncode
    report = REPORTS / f"unsteady-{name}.json"
    report.unlink(missing_ok=True)
    if code != FAILED or not last_failed.exists():
        return code
    failed = sorted(json.loads(last_failed.read_text()))
    if len(failed) > AGAIN_MAX:
        print(f"{len(failed)} tests failed, more than {AGAIN_MAX}: none is run again", flush=True)
        return code
    print(f"\n{len(failed)} failed; running each again alone:", *failed, sep="\n  ", flush=True)
    failed_twice = [test for test in failed if _fails_alone(test, arguments)]
    unsteady = [test for test in failed if test not in failed_twice]
    if unsteady:
        REPORTS.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps({"suite": name, "unsteady": unsteady}, indent=2) + "\n")
        print(f"\nUNSTEADY, failed beside others and passed alone ({report}):", *unsteady, sep="\n  ", flush=True)
    if failed_twice:
        print("\nFAILED, also alone:", *failed_twice, sep="\n  ", flush=True)
    return code if failed_twice else 0


def _fails_alone(test: str, arguments: list[str]) -> bool:
    return _pytest([test, *(["--thorough"] if "--thorough" in arguments else []), "-n", "0"]).returncode != 0


def _pytest(arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "pytest", *arguments]
    try:
        # The whole suite has no limit of its own: each of its tests has one.
        return subprocess.run(command, timeout=AGAIN_LIMIT_S if "::" in arguments[0] else None, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, FAILED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
