"""`make fuzz-api`: every route and the agents' protocol of a real service, as a person, an agent and a stranger.

Fails if an answer has status 500, a status or a content type that the description does not name, or another shape; if
something invalid is accepted; if a list cannot be read afterwards; or if the service logged an error.
"""

import argparse
import copy
import json
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from tests.benchmarks.circumstances import end_when_told
from tests.fuzz.ground import Ground, ground
from tests.fuzz.play import Share, Tally, play

CASES_LEAST = 5_000
PEOPLE, AGENTS, ANY = "^/(api|healthz|readyz)", "^/agent", "^/"
SYNC, WAKE, JOIN = "^/agent/v1/sync$", "^/agent/v1/wake$", "^/agent/v1/join$"
NODE = "fuzzed"
SYNC_TIMES = 10
"""A report has as many fields as all other requests together."""
REFUSED_EXAMPLES = 3
"""Drawn requests of each route for a caller that may not use it: each gets the same answer."""
LISTS = (
    "/api/v1/jobs?limit=1000", "/api/v1/nodes?limit=10000", "/api/v1/notices?limit=1000", "/api/v1/handoffs?limit=1000",
    "/api/v1/ledger", "/api/v1/pools/prices", "/api/v1/audit?limit=1000", "/api/v1/leases?limit=1000",
)  # fmt: skip
LOG_OF_ERRORS = ("Traceback", " ERROR ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if nothing was wrong and enough was asked."""
    options = _parser().parse_args(arguments)
    began = time.monotonic()
    report = fuzz(seed=options.seed, examples=options.examples, for_s=options.for_s)
    report["seconds"] = round(time.monotonic() - began, 1)
    if report["cases"] < options.cases:
        report["failures"].append({"check": "cases", "what": f"{report['cases']} cases, wanted {options.cases}"})
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{report['cases']} cases in {report['seconds']:.0f} s, {len(report['failures'])} failures: {options.report}")
    for failure in report["failures"][:20]:
        print(json.dumps(failure)[:1_000])
    return 1 if report["failures"] else 0


def fuzz(*, seed: int, examples: int, for_s: int) -> dict[str, Any]:
    """Every caller's share against one service, and what was found."""
    tally = Tally()
    with ground() as place:
        place.populate()
        described = httpx.get(f"{place.url}/api/v1/openapi.json", headers=place.headers("operator"), timeout=30).json()
        described = of_node(described, NODE)
        for share in shares(place, examples=examples, for_s=for_s):
            play(place.url, described, share, tally, seed=seed)
        failures = tally.shown + unreadable(place) + logged(place)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()} {platform.system()}, Python {platform.python_version()}",
        "seed": seed,
        "cases": tally.cases,
        "routes": _by_route(tally),
        "failed_checks": {f"{route}: {check}": count for (route, check), count in sorted(tally.failures.items())},
        "failures": failures,
    }


def of_node(described: dict[str, Any], node_id: str) -> dict[str, Any]:
    """The description for the agent of one node, whose token speaks for that node only. And where it takes a token's
    id, it takes that of no token: what is played with must not end those who play."""
    found = copy.deepcopy(described)
    found["components"]["schemas"]["NodeInfo"]["properties"]["node_id"] = {"const": node_id}
    for parameter in found["paths"]["/agent/v1/wake"]["get"]["parameters"]:
        if parameter["name"] == "node_id":
            parameter["schema"] = {"const": node_id}
    for methods in found["paths"].values():
        for parameter in (each for operation in methods.values() for each in operation.get("parameters", ())):
            if parameter["name"] == "token_id":
                parameter["schema"] = {"const": "0123abcd"}
    return found


def shares(place: Ground, *, examples: int, for_s: int) -> tuple[Share, ...]:
    """Who asks what: those who may, thoroughly; those who may not, and a stranger, a little of everything."""
    most, some, little = (max(1, round(part * for_s)) for part in (0.35, 0.2, 0.05))
    few = min(examples, REFUSED_EXAMPLES)
    agent = place.node(NODE)
    return (
        Share(place.headers("admin"), PEOPLE, examples, most),
        Share(agent, WAKE, examples, little),
        Share(agent, SYNC, examples * SYNC_TIMES, some, borders=False),
        Share(agent, SYNC, 1, some),
        Share(place.headers("operator"), AGENTS, few, little, borders=False),
        Share(agent, PEOPLE, few, little, borders=False),
        Share(place.headers("join"), JOIN, examples, little),
        Share(place.headers(None), ANY, few, little, borders=False),
    )


def unreadable(place: Ground) -> list[dict[str, Any]]:
    """Lists that what was stored has spoilt for all later readers."""
    with httpx.Client(base_url=place.url, headers=place.headers("operator"), timeout=60) as client:
        answers = {path: client.get(path) for path in LISTS}
    return [
        {"check": "read afterwards", "route": f"GET {path}", "status": answer.status_code, "answer": answer.text[:500]}
        for path, answer in answers.items()
        if answer.status_code != 200
    ]


def logged(place: Ground) -> list[dict[str, Any]]:
    """Errors that the service logged, also those of its reconcilers."""
    lines = place.log.read_text(errors="replace").splitlines()
    return [
        {"check": "log", "what": "\n".join(lines[number : number + 60])}
        for number, line in enumerate(lines)
        if any(word in line for word in LOG_OF_ERRORS)
    ][:10]


def _by_route(tally: Tally) -> dict[str, dict[str, int]]:
    routes: dict[str, dict[str, int]] = {}
    for (route, status), count in sorted(tally.answers.items()):
        routes.setdefault(route, {})[str(status)] = count
    return routes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("--examples", type=int, default=60, help="drawn requests for each route and caller")
    parser.add_argument("--cases", type=int, default=CASES_LEAST, help="fewer answers in all than this are a failure")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--for-s", type=int, default=1_800, help="seconds that drawing may take, in all")
    parser.add_argument("--report", type=Path, default=Path("build/reports/fuzz-api.json"))
    return parser


if __name__ == "__main__":
    end_when_told()
    sys.exit(main())
