"""What a job's code may try on the agent that started it. Each attempt ends as "refused: ..." or "done: ...".

python -m tests.agent.jobuser.probes NODE_ID DATABASE_FOLDER    tries all as the user that calls it
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PTRACE_SEIZE = 0x4206
CANARY = "canary-in-the-environment-of-the-agent"


def probe(node_id: str, database: Path) -> dict[str, str]:
    """Try everything on the agent of this node, whose command line says where its files are."""
    agent, command = find_process("agent.main", node_id)
    token, run_dir = (command[command.index(name) + 1] for name in ("--token-file", "--run-dir"))
    run_dir = Path(run_dir)
    zygote, _ = find_process("agent.supervisor.zygote", str(run_dir / "s" / "z.sock"))
    tries: dict[str, Callable[[], Any]] = {
        "read the token": lambda: Path(token).read_text(),
        "read the node's key": lambda: (run_dir / "node-key.json").read_text(),
        "read the journal": lambda: (run_dir / "journal.jsonl").read_text(),
        "list the run directory": lambda: os.listdir(run_dir),
        "write into the run directory": lambda: (run_dir / "planted").write_text("x"),
        "connect to the zygote": lambda: connect(run_dir / "s" / "z.sock"),
        "read the files of the database": lambda: (database / "PG_VERSION").read_text(),
        "connect to the database": lambda: connect(next(database.glob(".s.PGSQL.*"), database / ".s.PGSQL.5432")),
    }
    for path in bound_sockets(run_dir):
        tries[f"connect to {path.name}"] = lambda path=path: connect(path)
    for name, pid in (("agent", agent), ("zygote", zygote)):
        tries |= {
            f"read the environment of the {name}": lambda pid=pid: Path(f"/proc/{pid}/environ").read_bytes(),
            f"read the memory of the {name}": lambda pid=pid: os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY)),
            f"list the files of the {name}": lambda pid=pid: os.listdir(f"/proc/{pid}/fd"),
            f"signal the {name}": lambda pid=pid: os.kill(pid, 0),
            f"raise the {name}'s chance to be killed": lambda pid=pid: os.close(
                os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY)
            ),
            f"trace the {name}": lambda pid=pid: seize(pid),
        }
    tries["become root"] = lambda: os.setuid(0)
    return {name: outcome(attempt) for name, attempt in tries.items()}


def outcome(attempt: Callable[[], Any]) -> str:
    """A refusal is what the kernel says about rights; anything else would hide that a probe does not work."""
    try:
        return f"done: {attempt()!r}"[:200]
    except PermissionError as error:
        return f"refused: {error}"
    except OSError as error:
        return f"failed: {error}"


def about_me() -> dict[str, Any]:
    """Who the calling process is, and what came to it from the agent."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    return {
        "ids": [*os.getresuid(), *os.getresgid(), *os.getgroups()],
        "capabilities": [int(status[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Amb")],
        "no_new_privileges": status["NoNewPrivs"].strip(),
        "environment": dict(os.environ),
        "first_environment": Path("/proc/self/environ").read_text(errors="replace"),
        "files": [link for link in map(link_of, os.listdir("/proc/self/fd")) if link.startswith("/")],
        "says": outcome(lambda: Path("/dev/stdout").open("a").write("written to the log\n")),
    }


def link_of(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""


def find_process(*words: str) -> tuple[int, list[str]]:
    """The process with these words in its command line, which everybody may read. Ranks have that of their zygote."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_text().split("\0")
            is_rank = (entry / "comm").read_text().startswith("liver-")
        except OSError:
            continue
        if not is_rank and set(words) <= set(command):
            return int(entry.name), command
    raise LookupError(f"no process with {words}")


def bound_sockets(run_dir: Path) -> list[Path]:
    """The kernel names every unix socket to everybody."""
    paths = (line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return sorted({Path(path) for path in paths if path.startswith(f"{run_dir}/")})


def connect(path: Path) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(5.0)
        client.connect(str(path))
    return f"connected to {path.name}"


def seize(pid: int) -> None:
    """Ends with the thread that calls it."""
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_SEIZE, pid, None, None):
        raise OSError(ctypes.get_errno(), "ptrace")


if __name__ == "__main__":
    signal.alarm(60)
    sys.stdout.write(json.dumps(probe(sys.argv[1], Path(sys.argv[2]))))
