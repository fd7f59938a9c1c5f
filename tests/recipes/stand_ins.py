"""Modules that recipes of Megatron-Bridge import and that are not installed here: models, data sets, trackers.

Recipes, and the helpers that set what several of them share, are imported as they are. Whatever else they import is a
stand-in that keeps what is set on it, and knows Megatron's own defaults of what is not.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from typing import Any

REAL = (
    "megatron.bridge.recipes",
    "megatron.bridge.perf_recipes",
    "megatron.bridge.training.mixed_precision",
    "megatron.bridge.training.comm_overlap",
    "megatron.bridge.utils.cuda_graph",
)
_PACKAGES = ("megatron", "megatron.bridge", "megatron.bridge.training", "megatron.bridge.utils")
_SIZES = ("vocab_size", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
_SHORT_NAME = 6


def defaults(path: Path, *classes: str) -> dict[str, Any]:
    """What these dataclasses say of their fields; None where that is no plain value."""
    found: dict[str, Any] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name in classes:
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    found[field.target.id] = _plain(field.value)
    return found


def _plain(value: ast.expr | None) -> Any:
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


class Known:
    """Megatron's defaults, from a checkout of Megatron-LM."""

    def __init__(self, checkout: Path) -> None:
        core = checkout / "megatron" / "core"
        self.model = defaults(core / "model_parallel_config.py", "ModelParallelConfig") | defaults(
            core / "transformer" / "transformer_config.py", "TransformerConfig", "MLATransformerConfig"
        )
        self.optimizer = defaults(
            core / "optimizer" / "optimizer_config.py", "OptimizerConfig", "AdamOptimizerConfig", "SGDOptimizerConfig"
        )
        self.ddp = defaults(
            core / "distributed" / "distributed_data_parallel_config.py", "DistributedDataParallelConfig"
        )

    def of(self, kind: str, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """Those of a class, by its name; None where it is not one of Megatron's."""
        if kind == "provider" or (kind.endswith(("Provider", "Config")) and "tensor_model_parallel_size" in values):
            return self.model
        return {"OptimizerConfig": self.optimizer, "DistributedDataParallelConfig": self.ddp}.get(kind)


class StandIn:
    """Keeps what is set. Can be called, indexed, compared and counted with, as code that only builds settings does."""

    known: Known

    def __init__(self, *_: Any, kind: str = "loose", **values: Any) -> None:
        self.__dict__.update({"_kind": kind, **values})

    def __getattr__(self, name: str) -> Any:
        kind = self.__dict__.get("_kind", "loose")
        if name.startswith("__"):
            raise AttributeError(name)
        table = StandIn.known.of(kind, self.__dict__)
        if kind == "provider" and name in _SIZES:
            return 64
        if table is not None and name in table:
            return table[name]
        if kind == "ConfigContainer" and name in ("peft", "comm_overlap", "mixed_precision", "env_vars", "profiling"):
            return None
        if kind == "ConfigContainer":
            return self.__dict__.setdefault(name, StandIn(kind="SubConfig"))
        if kind.endswith("Config"):
            return None
        if kind in ("loose", "provider"):
            return StandIn(kind=kind)
        raise AttributeError(f"{kind}.{name}")

    def __call__(self, *_: Any, **values: Any) -> StandIn:
        return StandIn(**{name: value for name, value in values.items() if name != "kind"})

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __contains__(self, _: object) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        return self.__dict__.get(key) if isinstance(key, str) else StandIn()

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__[str(key)] = value

    def __fspath__(self) -> str:
        return "/nowhere"

    def __str__(self) -> str:
        return "stand-in"

    def _number(self, _: Any) -> int:
        return 1

    def _less(self, _: Any) -> bool:
        return False

    def __or__(self, _: Any) -> Any:
        return object

    __mul__ = __rmul__ = __add__ = __radd__ = __sub__ = __floordiv__ = __truediv__ = _number
    __lt__ = __gt__ = __le__ = __ge__ = _less
    __ror__ = __or__


class Plain:
    """The settings of a stand-in that have a value."""

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._settings, name)
        if isinstance(value, StandIn):
            raise AttributeError(name)
        return value


class _Named(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(name=name)

    def __getitem__(cls, _: Any) -> Any:
        return StandIn()

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


def _class(name: str) -> type:
    kind = "provider" if "Provider" in name or name.endswith("ModelConfig") else name

    def begin(self: StandIn, *_: Any, **values: Any) -> None:
        StandIn.__init__(self, **{**values, "kind": kind})

    return _Named(name, (StandIn,), {"__init__": begin})


class _Bridge:
    """Makes providers of models from names of Hugging Face."""

    @classmethod
    def from_hf_pretrained(cls, *_: Any, **__: Any) -> _Bridge:
        return cls()

    from_hf_config = from_auto_config = from_hf_pretrained

    def to_megatron_provider(self, *_: Any, **__: Any) -> StandIn:
        return StandIn(kind="provider")

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: StandIn(kind="provider")


class _Module(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_class = name[:1].isupper() and (not name.isupper() or (len(name) <= _SHORT_NAME and "_" not in name))
        made = _Bridge if name == "AutoBridge" else _class(name) if is_class else StandIn()
        if name == "torch":
            made = importlib.import_module("torch")
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def __init__(self, source: Path, *, last: bool) -> None:
        self._source, self._last = source, last

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        if self._last != (top != "megatron") or top in sys.stdlib_module_names:
            return None
        if name not in _PACKAGES and any(name == real or name.startswith(f"{real}.") for real in REAL):
            base = self._source / name.replace(".", "/")
            if base.is_dir():
                init = base / "__init__.py"
                return importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(base)])
            if base.with_suffix(".py").is_file():
                return importlib.util.spec_from_file_location(name, base.with_suffix(".py"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(bridge: Path, megatron: Path) -> None:
    """From now on this process imports recipes from these checkouts, and stand-ins for what they need."""
    StandIn.known = Known(megatron)
    sys.meta_path.insert(0, _Finder(bridge / "src", last=False))
    sys.meta_path.append(_Finder(bridge / "src", last=True))
