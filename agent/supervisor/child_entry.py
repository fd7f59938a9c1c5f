"""What a process that the zygote started runs: the entry of a rank or a store, and what it shares with the zygote.

Usually that is a fork which has everything imported. Where a fork could not be used it becomes a new program here, with
the same request, listening socket and shared memory, and imports everything itself.
"""

import importlib
import json
import mmap
import os
import socket
import struct
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

PROGRAM = "agent.supervisor.child_entry"
COMM_CHARS_MAX = 15
_LAST_STEP = struct.Struct("=QQ")


class LastStep:
    """Memory in which a rank writes the last step that it has made, and its generation; the zygote reads it when the
    rank has ended. So steps are known that no agent was there to hear of and no disk had room for."""

    def __init__(self, descriptor: int = -1) -> None:
        """Of that descriptor; by default memory that only forks share."""
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _LAST_STEP.size)

    @classmethod
    def for_program(cls) -> "LastStep":
        """Its descriptor stays open in a program that the process becomes."""
        descriptor = os.memfd_create("last-step", 0)
        os.ftruncate(descriptor, _LAST_STEP.size)
        return cls(descriptor)

    def write(self, generation: int, step: int) -> None:
        """The rank has made this step."""
        _LAST_STEP.pack_into(self._memory, 0, generation, step)

    def read(self) -> tuple[int, int] | None:
        """Generation and step; None if it has made none."""
        generation, step = _LAST_STEP.unpack_from(self._memory, 0)
        return (generation, step) if generation and step else None

    def close(self) -> None:
        """Not needed any more in this process."""
        self._memory.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)


def run_entry(request: Mapping[str, Any], control: socket.socket, last_step: LastStep) -> int:
    """Call the entry of `request` in its folder and environment; its exit status."""
    os.environ.update({str(name): str(value) for name, value in request.get("environment", {}).items()})
    if request.get("workdir"):
        os.chdir(str(request["workdir"]))
        sys.path.insert(0, str(request["workdir"]))
    module, _, function = str(request["entry"]).partition(":")
    result = getattr(importlib.import_module(module), function)(request["spec"], control, last_step)
    return result if isinstance(result, int) else 0


def become_program(
    request: Mapping[str, Any], control: socket.socket, last_step: LastStep, preload: tuple[str, ...]
) -> NoReturn:
    """Replace the calling process by a new program that runs `request`. CUDA finds the request's environment there
    from the start. What is secret goes through memory, not by the command line. Raises OSError."""
    inherited = os.memfd_create("request", 0)  # Without a flag that would close it here.
    os.write(inherited, json.dumps({"request": dict(request), "preload": preload}).encode())
    os.lseek(inherited, 0, os.SEEK_SET)
    control.set_inheritable(True)
    asked = {str(name): str(value) for name, value in request.get("environment", {}).items()}
    # The zygote's path to the product stays: a job's own is for what it starts itself.
    environment = {**os.environ, **asked, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    command = [sys.executable, "-P", "-m", PROGRAM, *map(str, (inherited, control.fileno(), last_step.descriptor))]
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
    """The new program. `arguments`: the descriptors of the request, of the socket and of the last step's memory."""
    code = 1
    try:
        with os.fdopen(int(arguments[0]), "rb") as inherited:
            found = json.load(inherited)
        request, control = found["request"], socket.socket(fileno=int(arguments[1]))
        last_step = LastStep(int(arguments[2]))
        for descriptor in (control.fileno(), last_step.descriptor):
            os.set_inheritable(descriptor, False)
        name_process(str(request["name"]))
        for name in found["preload"]:
            importlib.import_module(name)
        code = run_entry(request, control, last_step)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    end_process(code)


if __name__ == "__main__":
    main(sys.argv[1:])
