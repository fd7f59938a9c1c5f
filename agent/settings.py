"""The agent's settings, read once: command line first, then environment (`LIVER_AGENT_*`), then defaults."""

import hashlib
import os
import re
import ssl
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agent.notices import aws, gcp
from agent.protocol.jobfile import ENVIRONMENT_NAME
from agent.protocol.secret_values import NO_SECRETS, SecretPlaces
from agent.protocol.sync import Provider
from agent.supervisor.job_user import JobUser, JobUserError, check_job_user, find_job_user

SOCKET_PATH_BYTES_MAX = 107
SOCKET_NAME_BYTES = 40
TOKEN_CHARS_MAX = 4_096
DEFAULT_PRELOAD = "agent.worker.preload,agent.worker.rank_process"
DEFAULT_RANK_ENTRY = "agent.worker.rank_process:run"
DEFAULT_STORE_ENTRY = "agent.supervisor.store_child:run"


class SettingsError(Exception):
    """A setting is wrong; the text names it and the rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """One agent. `peer_port` 0 takes a free port, the same as last time if it is still free. `relay_ports`: the first
    and the last on which a stream relay may listen, 0 for any."""

    service_url: str
    token: str
    node_id: str
    slots: int
    provider: Provider
    pool: str
    run_dir: Path
    socket_dir: Path
    host: str
    peer_port: int = 0
    relay_ports: tuple[int, int] = (0, 0)
    device: str = "cpu"
    gpus: tuple[str, ...] = ()
    preload: str = DEFAULT_PRELOAD
    rank_entry: str = DEFAULT_RANK_ENTRY
    store_entry: str = DEFAULT_STORE_ENTRY
    aws_imds_url: str = aws.DEFAULT_URL
    gcp_metadata_url: str = gcp.DEFAULT_URL
    gcp_notice_s: int = 0
    notice_interval_s: float = aws.INTERVAL_S
    shutdown_inhibitor: bool = True
    shutdown_s: float = 25.0
    tls_ca: str | None = None
    job_user: JobUser | None = None
    secret_places: SecretPlaces = NO_SECRETS


def read_token(path: str) -> str:
    """The token in a file, without the white space around it. Raises SettingsError naming file and rule."""
    try:
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--token-file {path} cannot be read: {error}") from None
    if not text or len(text) > TOKEN_CHARS_MAX or not text.isascii() or any(character.isspace() for character in text):
        raise SettingsError(f"--token-file {path} must contain one token of 1 to {TOKEN_CHARS_MAX} characters")
    return text


def check_tls_ca(path: str) -> str | None:
    """The file, or None for the system's own certificates. Raises SettingsError if it holds none."""
    try:
        ssl.create_default_context(cafile=path or None)
    except OSError as error:
        raise SettingsError(f"--tls-ca {path} cannot be used: {error.strerror or error}") from None
    return path or None


def relay_ports(text: str) -> tuple[int, int]:
    """The ports of --relay-ports: "0", "7400" or "7400-7415". Raises SettingsError."""
    low, _, high = text.partition("-")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = -1, -1
    if not 0 <= found[0] <= found[1] <= 65_535 or (found[0] == 0 and found != (0, 0)):
        raise SettingsError(f"--relay-ports {text!r} must be 0, a port, or two with - between them, such as 7400-7415")
    return found


def job_user(name: str, secret: Iterable[Path]) -> JobUser | None:
    """The user of --job-user; None without one. Raises SettingsError also where that user can read what is secret."""
    if not name:
        return None
    try:
        found = find_job_user(name)
        check_job_user(found, secret)
    except JobUserError as error:
        raise SettingsError(f"--job-user: {error}") from None
    return found


def secret_places(folders: str, names: str) -> SecretPlaces:
    """What --job-secrets-dir and --job-secrets-env allow; both name several with commas. Raises SettingsError."""
    found = tuple(Path(part.strip()) for part in folders.split(",") if part.strip())
    for folder in found:
        if not folder.is_absolute() or not folder.is_dir():
            raise SettingsError(f"--job-secrets-dir {folder} must be the whole path of a folder")
    allowed = tuple(part.strip() for part in names.split(",") if part.strip())
    for name in allowed:
        if not re.match(ENVIRONMENT_NAME, name.removesuffix("*")):
            raise SettingsError(
                f"--job-secrets-env {name!r} must be the name of a variable, or the beginning of one and *"
            )
    return SecretPlaces(found, allowed)


def default_run_dir(node_id: str, environ: Mapping[str, str]) -> Path:
    """The directory of an agent's journal and logs if --run-dir is not set."""
    state = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "liver" / "agent" / node_id


def socket_dir_for(run_dir: Path) -> Path:
    """A directory whose path is short enough for the kernel's limit on sockets. Only its owner may enter it.

    Raises SettingsError if it exists and belongs to another user.
    """
    inside = run_dir / "s"
    if len(os.fsencode(inside)) + SOCKET_NAME_BYTES <= SOCKET_PATH_BYTES_MAX:
        return _private_directory(inside)
    digest = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:12]
    return _private_directory(Path(tempfile.gettempdir()) / f"liver-{os.getuid()}-{digest}")


def _private_directory(path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.mkdir(exist_ok=True, mode=0o700)
        found = path.lstat()
    except OSError as error:
        raise SettingsError(f"--run-dir: {path} cannot be created: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise SettingsError(f"--run-dir: {path} must be a directory that only its owner may enter")
    return path
