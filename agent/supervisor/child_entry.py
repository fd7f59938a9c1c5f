"""What a process that the zygote started runs: the entry of a rank or a store.

Usually that is a fork which has everything imported. Where a fork could not be used it becomes a new program here, with
the same request and the same listening socket, and imports everything itself.
"""

import importlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

PROGRAM = "agent.supervisor.child_entry"
COMM_CHARS_MAX = 15


def run_entry(request: Mapping[str, Any], control: socket.socket) -> int:
    """Call the entry of `request` in its folder and environment; its exit status."""
    os.environ.update({str(name): str(value) for name, value in request.get("environment", {}).items()})
    if request.get("workdir"):
        os.chdir(str(request["workdir"]))
        sys.path.insert(0, str(request["workdir"]))
    module, _, function = str(request["entry"]).partition(":")
    result = getattr(importlib.import_module(module), function)(request["spec"], control)
    return result if isinstance(result, int) else 0


def become_program(request: Mapping[str, Any], control: socket.socket, preload: tuple[str, ...]) -> NoReturn:
    """Replace the calling process by a new program that runs `request`. CUDA finds the request's environment there
    from the start. What is secret goes through memory, not by the command line. Raises OSError."""
    inherited = os.memfd_create("request", 0)  # Without a flag that would close it here.
    os.write(inherited, json.dumps({"request": dict(request), "preload": preload}).encode())
    os.lseek(inherited, 0, os.SEEK_SET)
    control.set_inheritable(True)
    asked = {str(name): str(value) for name, value in request.get("environment", {}).items()}
    # The zygote's path to the product stays: a job's own is for what it starts itself.
    environment = {**os.environ, **asked, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    command = [sys.executable, "-P", "-m", PROGRAM, str(inherited), str(control.fileno())]
    os.execve(sys.executable, command, environment)


def name_process(name: str) -> None:
    """Its command line is the zygote's or Python's; so `ps -o pid,comm` and `top` tell ranks from stores."""
    comm = f"liver-{name.partition('/')[0]}"[:COMM_CHARS_MAX]
    Path("/proc/self/comm").write_text(comm)


def end_process(code: int) -> NoReturn:
    """No exit handlers: in a fork they are the zygote's. A rank that needs one runs it in its entry."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def main(arguments: list[str]) -> NoReturn:
    """The new program. `arguments`: the descriptors of the request and of the socket."""
    code = 1
    try:
        with os.fdopen(int(arguments[0]), "rb") as inherited:
            found = json.load(inherited)
        request, control = found["request"], socket.socket(fileno=int(arguments[1]))
        control.set_inheritable(False)
        name_process(str(request["name"]))
        for name in found["preload"]:
            importlib.import_module(name)
        code = run_entry(request, control)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    end_process(code)


if __name__ == "__main__":
    main(sys.argv[1:])
