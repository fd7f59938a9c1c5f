"""From the entrypoint of a job file to the user's job object; every error says what was found and what to change."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from liver_core import PACKAGES
from liver_core.training.job import TrainingJob

CONSTRUCTOR = "(args, *, global_batch, micro_batch, seed)"
"""What every entrypoint is called with. `args` is one dict: `model` and `ddp` of the job file, and `args` over them."""


class EntrypointError(ValueError):
    """An entrypoint does not lead to a TrainingJob."""


def load_job(
    entrypoint: str,
    args: dict[str, Any],
    *,
    global_batch: int,
    micro_batch: int,
    seed: int,
    workdir: str | None = None,
) -> TrainingJob:
    """The job object of `module:Class`. Raises EntrypointError; what the user's code raised is its cause."""
    factory = find_class(import_user_module(entrypoint, workdir), entrypoint)
    return make_job(factory, args, global_batch=global_batch, micro_batch=micro_batch, seed=seed)


def import_user_module(entrypoint: str, workdir: str | None = None) -> ModuleType:
    """The module before the colon; `workdir` comes first on Python's path. Raises EntrypointError, also where it asks
    for a package that is named like one of LiveR."""
    name = entrypoint.partition(":")[0]
    if (top := name.partition(".")[0]) in PACKAGES and top != "liver_core":
        raise EntrypointError(f"entrypoint: {_is_ours(top)}")
    if workdir is not None and workdir not in sys.path:
        sys.path.insert(0, workdir)
    try:
        found = importlib.import_module(name)
        check_names()
    except EntrypointError:
        raise
    except Exception as error:
        wanted = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
        if wanted in PACKAGES and not name.startswith("liver_core."):
            raise EntrypointError(
                f"entrypoint: importing {name} failed: {_is_ours(wanted)}: {in_user_code(error)}"
            ) from error
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name is not None
            and f"{name}.".startswith(f"{error.name}.")
        ):
            where = "on Python's path" if workdir is None else f"in workdir {workdir}, nor on Python's path"
            fix = "set workdir to its folder, or install it" if workdir is None else "name a module that is there"
            raise EntrypointError(f"entrypoint: there is no module {error.name} {where}; {fix}") from error
        raise EntrypointError(f"entrypoint: importing {name} failed: {in_user_code(error)}") from error
    return found


def check_names() -> None:
    """Raise EntrypointError if this process has imported a package that is named like one of LiveR and is another."""
    for name in PACKAGES:
        module = sys.modules.get(name)
        places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", ())]
        place = next((each for each in places if each), None)
        if place is not None and not f"{place}/".startswith(f"{_ROOT}{name}/"):
            raise EntrypointError(f"entrypoint: {place}: {_is_ours(name)}")


def _is_ours(name: str) -> str:
    return f"{name} is the name of a package of LiveR, which ranks import in its place; rename yours"


def find_class(module: ModuleType, entrypoint: str) -> Callable[..., Any]:
    """What stands behind the colon: a class derived from TrainingJob, or a function that returns a job."""
    name = entrypoint.partition(":")[2]
    found = getattr(module, name, None)
    if found is None:
        jobs = [each for each, value in vars(module).items() if inspect.isclass(value) and _is_job(value)]
        there = sorted(each for each in jobs if not inspect.isabstract(vars(module)[each]))
        near = difflib.get_close_matches(name, there or list(vars(module)), n=1, cutoff=0.5)
        known = f"; its jobs are: {', '.join(there)}" if there else "; it has no class that derives from TrainingJob"
        guess = f"; did you mean {near[0]}?" if near else ""
        raise EntrypointError(f"entrypoint: module {module.__name__} has no {name}{known}{guess}")
    if inspect.isclass(found) and not _is_job(found):
        raise EntrypointError(f"entrypoint: {name} is not a TrainingJob: it must derive from {_contract()}")
    if not callable(found):
        raise EntrypointError(
            f"entrypoint: {name} is a {type(found).__name__}; it must be a class derived from {_contract()}"
        )
    return found


def make_job(
    factory: Callable[..., Any], args: dict[str, Any], *, global_batch: int, micro_batch: int, seed: int
) -> TrainingJob:
    """Call the class with what every job gets, and see that it is a job afterwards."""
    name = getattr(factory, "__name__", "the entrypoint")
    if missing := sorted(getattr(factory, "__abstractmethods__", ())):
        raise EntrypointError(f"{name}: lacks {', '.join(missing)}, which every TrainingJob must have")
    numbers = {"global_batch": global_batch, "micro_batch": micro_batch, "seed": seed}
    try:
        inspect.signature(factory).bind(args, **numbers)
    except TypeError as error:
        raise EntrypointError(f"{name}: is called as {name}{CONSTRUCTOR}, but {error}") from error
    except ValueError:
        pass  # A class without a signature that Python can show; the call itself will tell.
    try:
        job = factory(args, **numbers)
    except Exception as error:
        raise EntrypointError(f"{name}: did not take its arguments: {in_user_code(error)}") from error
    if not isinstance(job, TrainingJob):
        raise EntrypointError(f"{name}: returned a {type(job).__name__}, which is not a TrainingJob ({_contract()})")
    for field, value in numbers.items():
        if getattr(job, field, None) != value:
            found = f"is {getattr(job, field)!r}" if hasattr(job, field) else "is not set"
            raise EntrypointError(f"{name}: self.{field} {found}; __init__ must set it to what it is given, {value}")
    return job


def in_user_code(error: BaseException) -> str:
    """Kind and text of an error, and the last place outside of installed packages that it came through."""
    text = f"{type(error).__name__}: {error}".strip()
    if isinstance(error, SyntaxError):
        return text
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


_ROOT = __file__.rpartition("/liver_core/")[0] + "/"
_OURS = _ROOT + "liver_core/"


def _is_users(path: str) -> bool:
    return not path.startswith((_OURS, "<")) and "site-packages" not in path and f"{sys.base_prefix}/lib" not in path


def _is_job(value: type) -> bool:
    return issubclass(value, TrainingJob) and value is not TrainingJob


def _contract() -> str:
    return f"{TrainingJob.__module__}.{TrainingJob.__name__}"
