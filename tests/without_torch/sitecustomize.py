"""An environment in which torch and what comes with it cannot be imported, in this process and in all that it starts.

`make test` runs the service's tests with this folder on PYTHONPATH, in the one environment that it makes. A real
environment without torch is made by `make test-thorough THOROUGH=service`.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

# What the extras `agent` and `core` bring and the extras of the service and of its tests do not.
BLOCKED = frozenset({"dbus_fast", "einops", "megatron", "nixl", "tensorboardX", "torch"})


class NotInstalled(MetaPathFinder):
    """Answers as if nothing of that name were installed."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked by {__file__})", name=name)


sys.meta_path.insert(0, NotInstalled())
