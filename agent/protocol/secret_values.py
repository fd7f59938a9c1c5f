"""The values that a job's environment refers to: read on the node, from places that the operator of the node allows.

No error repeats a value. What is read goes to the rank and nowhere else.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agent.protocol.jobfile import JobFile, SecretReference

SECRET_BYTES_MAX = 65_536


class SecretError(Exception):
    """A value cannot be had; the text names the variable and the rule."""


@dataclass(frozen=True, slots=True)
class SecretPlaces:
    """Folders whose files jobs may refer to, and variables of the agent. A name that ends in `*` stands for all that
    begin so."""

    folders: tuple[Path, ...] = ()
    names: tuple[str, ...] = ()

    def allow(self, name: str) -> bool:
        """Whether a job may have this variable of the agent."""
        return any(name.startswith(known[:-1]) if known.endswith("*") else name == known for known in self.names)


NO_SECRETS = SecretPlaces()


def environment_of(job: JobFile, places: SecretPlaces, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the job's ranks. Raises SecretError."""
    found: dict[str, str] = {}
    for name, value in job.environment.items():
        if isinstance(value, str):
            found[name] = value
            continue
        try:
            found[name] = _value(value, places, environ)
        except SecretError as error:
            raise SecretError(f"environment.{name}: {error}") from None
    return found


def _value(reference: SecretReference, places: SecretPlaces, environ: Mapping[str, str]) -> str:
    if reference.from_file is not None:
        return _read(Path(reference.from_file), places.folders)
    name = str(reference.from_env)
    if not places.allow(name) or name.startswith("LIVER_"):
        raise SecretError(f"from_env {name}: --job-secrets-env of the agent does not allow it")
    if name not in environ:
        raise SecretError(f"from_env {name}: is not set on this node")
    return environ[name]


def _read(path: Path, folders: tuple[Path, ...]) -> str:
    try:
        real = path.resolve(strict=True)
        if not any(real.is_relative_to(folder.resolve()) for folder in folders):
            raise SecretError(f"from_file {path}: lies in no folder that --job-secrets-dir of the agent allows")
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # What was opened, not what the path named a moment ago.
            if os.readlink(f"/proc/self/fd/{descriptor}") != str(real):
                raise SecretError(f"from_file {path}: changed while it was read")
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise SecretError(f"from_file {path}: must be a plain file")
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(SECRET_BYTES_MAX + 1)
        finally:
            os.close(descriptor)
    except (OSError, RuntimeError) as error:
        raise SecretError(f"from_file {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > SECRET_BYTES_MAX:
        raise SecretError(f"from_file {path}: must have at most {SECRET_BYTES_MAX} bytes")
    try:
        text = data.decode().removesuffix("\n")
    except UnicodeDecodeError:
        raise SecretError(f"from_file {path}: must be text in UTF-8") from None
    if "\0" in text:
        raise SecretError(f"from_file {path}: must not contain a NUL character")
    return text
