"""What is installed of this product: its release, and what a program needs that is not there.

Imports nothing outside the standard library, since it says what is missing.
"""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

DISTRIBUTION = "liver-handoff"
"""It is not published, and `liver` on PyPI is somebody else's: what is to be installed is always named by its file."""
SOURCE = "source"

_CORE = ("megatron", "numpy", "psutil", "tensorboardX", "torch")
NEEDS = {
    "service": ("alembic", "boto3", "fastapi", "jinja2", "psycopg", "pydantic_settings", "sqlalchemy", "uvicorn"),
    "core": _CORE,
    "agent": ("dbus_fast", "fastapi", "uvicorn", *_CORE),
}
"""By extra: packages without which nothing of it runs."""


@cache
def release() -> str:
    """The installed release, or SOURCE where the product runs from a tree that is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return SOURCE


def install_command(*extras: str) -> str:
    """What to type to have these extras. In a tree that is not installed, it installs the tree."""
    wheel = f"./{DISTRIBUTION.replace('-', '_')}-{release()}-py3-none-any.whl"
    place = "." if release() == SOURCE else wheel
    return f"pip install '{place}[{','.join(extras)}]'"


def lacking(*extras: str) -> str:
    """Empty if all of these extras are there, else the end of a sentence: "needs pip install ..."."""
    missing = [name for extra in extras for name in NEEDS[extra] if not is_there(name)]
    return f"needs {install_command(*extras)} ({_some(missing)} not installed)" if missing else ""


def is_there(module: str) -> bool:
    """Whether a module could be imported. Its packages are imported for that, the module is not."""
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


def _some(names: Sequence[str]) -> str:
    first = dict.fromkeys(names)
    return f"{', '.join([*first][:3])}{' and more' if len(first) > 3 else ''} {'is' if len(first) == 1 else 'are'}"
