"""The user that a job's code runs as where the agent is root: how a forked process becomes that user for good, what it
keeps of the agent's environment, and what must hold before an agent starts with one."""

import ctypes
import json
import os
import pwd
import resource
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PASSED_ON = frozenset({"HOME", "PATH", "LANG", "LANGUAGE", "TZ", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD"})
PASSED_ON_BY_PREFIX = (
    *("LC_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "UCX_", "NIXL_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "MALLOC_"),
    *("TORCH", "PYTORCH_", "TRITON_", "NVTE_"),
)
"""What says how to compute, and nothing of who the agent is. Anything else stays with the agent."""

LOOK_S = 30.0
_SET_DUMPABLE, _SET_NO_NEW_PRIVS = 4, 38  # linux/prctl.h
_LOOK = """
import json, os, sys
secret, code, imported = json.loads(sys.argv[1])
print(json.dumps([
    [path for path in secret if os.access(path, os.R_OK)],
    [path for path in code if os.access(path, os.W_OK)],
    [path for path in imported if not os.access(path, os.R_OK)],
]))
"""


class JobUserError(Exception):
    """The user cannot run a job's code here; the text says why."""


@dataclass(frozen=True, slots=True)
class JobUser:
    """Looked up once, by the agent: what looks up users may start threads, which a zygote must not have."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    def to_text(self) -> str:
        """For the zygote's command line and the journal."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> "JobUser":
        """The inverse of `to_text`."""
        found = json.loads(text)
        return cls(**found | {"groups": tuple(found["groups"])})

    def environment(self) -> dict[str, str]:
        """What programs expect to find of the user who runs them."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def become(self) -> None:
        """Have the calling process, which is root's, be this user's from now on. Raises OSError where it cannot."""
        self.make_home()
        _lift_memory_lock()
        os.setgroups(self.groups)
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)
        _prctl(_SET_NO_NEW_PRIVS, 1)
        # Ranks of one node read each other's memory in a handoff. The kernel forbids that to a process that was root's.
        _prctl(_SET_DUMPABLE, 1)

    def make_home(self) -> None:
        """The home, where it is one that the agent makes. Raises OSError where it is somebody else's."""
        if not os.path.lexists(self.home):
            os.mkdir(self.home, 0o700)
            os.chown(self.home, self.uid, self.gid, follow_symlinks=False)
        if os.lstat(self.home).st_uid != self.uid:
            raise PermissionError(f"{self.home}, the home of {self.name}, belongs to another user")


def find_job_user(name: str) -> JobUser:
    """The user of this name, if an agent of the calling user may run jobs as that user. Raises JobUserError."""
    if os.geteuid() != 0:
        raise JobUserError(
            f"only an agent that runs as root can run jobs as another user; this one has uid {os.getuid()}"
        )
    try:
        found = pwd.getpwnam(name)
    except (KeyError, ValueError):
        raise JobUserError(f"there is no user {name!r} on this machine") from None
    groups = tuple(sorted(os.getgrouplist(name, found.pw_gid)))
    if found.pw_uid == 0 or 0 in groups:
        raise JobUserError(f"{name} must not be root, nor in the group of root")
    home = Path(found.pw_dir)
    if not home.is_dir() or home.is_symlink() or home.stat().st_uid != found.pw_uid:
        home = Path(tempfile.gettempdir()) / f"liver-home-{found.pw_uid}"
    return JobUser(name, found.pw_uid, found.pw_gid, groups, str(home))


def check_job_user(user: JobUser, secret: Iterable[Path]) -> None:
    """Look as that user whether what must stay secret can be read, or what the zygote imports as root be changed.

    Raises JobUserError.
    """
    try:
        user.make_home()
        readable, changeable, closed = _look(user, [str(path) for path in secret])
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise JobUserError(f"a process of {user.name} cannot be started with {sys.executable}: {error}") from None
    if readable:
        raise JobUserError(f"{user.name} can read {readable[0]}; it must be closed to all but root (chmod go=)")
    if changeable:
        raise JobUserError(f"{user.name} can change {changeable[0]}, from which the agent runs code as root")
    if closed:
        raise JobUserError(f"{user.name} cannot read {closed[0]}, which ranks import from")


def environment_for_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """What of the agent's environment a job's code may see."""
    return {name: value for name, value in environ.items() if name in PASSED_ON or name.startswith(PASSED_ON_BY_PREFIX)}


def _look(user: JobUser, secret: list[str]) -> tuple[list[str], list[str], list[str]]:
    ours = str(Path(__file__).resolve().parent.parent)
    installed = [ours, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]
    installed = [path for path in installed if os.path.exists(path)]
    code = [path for path in dict.fromkeys((*installed, *sys.path, sys.executable)) if os.path.exists(path)]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _LOOK, json.dumps([secret, code, installed])],
        user=user.uid,
        group=user.gid,
        extra_groups=user.groups,
        env={},
        cwd="/",
        capture_output=True,
        timeout=LOOK_S,
        check=True,
    )
    readable, changeable, closed = json.loads(done.stdout)
    return readable, changeable, closed


def _lift_memory_lock() -> None:
    """Root may lock as much memory as it likes, and RDMA needs that."""
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (OSError, ValueError):
        return


def _prctl(option: int, value: int) -> None:
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0))):
        error = ctypes.get_errno()
        raise OSError(error, f"prctl {option}: {os.strerror(error)}")
