"""Wall clocks that can be put forward and back, one for each machine of a trial. Needs a C compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("shifted_clock.c")
SECOND_BYTES = 8


def compiler() -> str | None:
    """Where one is."""
    return shutil.which("cc") or shutil.which("gcc")


class Clocks:
    """`environment` is for the processes of a machine; `shift` puts its clock off, also while they run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._library = folder / "shifted_clock.so"

    def build(self) -> None:
        """Compile what the processes preload."""
        found = compiler()
        assert found is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [found, "-O2", "-shared", "-fPIC", "-o", str(self._library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)

    def environment(self, machine: str) -> dict[str, str]:
        """Of a machine, whose clock is right at first."""
        path = self._file(machine)
        if not path.exists():
            self.shift(machine, 0)
        return {"LD_PRELOAD": str(self._library), "CHAOS_CLOCK": str(path)}

    def shift(self, machine: str, seconds: int) -> None:
        """From now on its clock is off by so many seconds."""
        path = self._file(machine)
        path.touch()
        # Written in place: the processes have mapped this file.
        with path.open("r+b") as file:
            file.write(seconds.to_bytes(SECOND_BYTES, "little", signed=True))

    def _file(self, machine: str) -> Path:
        return self._folder / f"{machine}.clock"
