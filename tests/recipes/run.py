"""Which recipes of NVIDIA's Megatron-Bridge the product can hand over, and what stands in the way of the others.

    python -m tests.recipes.run --bridge CHECKOUT --megatron CHECKOUT --report build/reports/recipes.json

Each recipe function is executed, with stand-ins for models and data, and the product's own check looks at the settings
that come out. What a model's class brings by itself is not seen: it is added by the family's name. A recipe that is
accepted has not been run.
"""

import argparse
import importlib
import inspect
import json
import re
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liver_core.training.unsupported_settings import refusals
from tests.recipes.stand_ins import Plain, StandIn, install

PACKAGES = {"performance": "megatron.bridge.perf_recipes", "library": "megatron.bridge.recipes"}
STATE_SPACE = re.compile("nemotronh|nemotron_3|qwen3_next|qwen35|mamba")
SEVERAL_STACKS = re.compile("wan|flux|_vl|vl_|omni|audio|gemma3_vl|ministral3")


@dataclass(frozen=True, slots=True)
class Recipe:
    """`refused`: each setting that does not go with a handoff, and why; empty: the product takes it."""

    kind: str
    name: str
    refused: dict[str, str]


def recipes(source: Path) -> Iterator[Recipe | str]:
    """Of both packages, and the text of each error."""
    for kind, package in PACKAGES.items():
        seen: set[str] = set()
        for path in sorted((source / package.replace(".", "/")).rglob("*.py")):
            if "utils" in path.parts:
                continue  # Parts of recipes.
            name = path.relative_to(source).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
            try:
                module = importlib.import_module(name)
            except Exception as error:  # Whatever a recipe's module does when it is imported.
                yield f"{name}: {error!r}"
                continue
            for function in _functions(module, name):
                if function.__name__ in seen:
                    continue  # Under another module's name too.
                seen.add(function.__name__)
                try:
                    made = function()
                except Exception as error:
                    yield f"{name}.{function.__name__}: {error!r}"
                    continue
                yield Recipe(kind, f"{name}.{function.__name__}", refused(made, f"{name}.{function.__name__}"))


def _functions(module: types.ModuleType, name: str) -> Iterator[Any]:
    for each, function in sorted(vars(module).items()):
        is_own = isinstance(function, types.FunctionType) and function.__module__ == name
        if is_own and not each.startswith("_") and each.endswith(("config", "_recipe")):
            needed = [item for item in inspect.signature(function).parameters.values() if item.default is item.empty]
            if not [item for item in needed if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]:
                yield function


def refused(config: Any, name: str) -> dict[str, str]:
    """What of a recipe does not go with a handoff."""
    model, optimizer, ddp = config.model, config.optimizer, config.ddp
    precision = config.mixed_precision
    if isinstance(precision, str):
        known = importlib.import_module("megatron.bridge.training.mixed_precision")
        precision = known.MIXED_PRECISION_RECIPES[precision]()
    _spread(precision, model, optimizer, ddp)
    overlap = config.comm_overlap
    if overlap is not None:
        tensor, sequence = getattr(model, "tensor_model_parallel_size", 1) or 1, getattr(model, "sequence_parallel", 0)
        model.tp_comm_overlap = bool(getattr(overlap, "tp_comm_overlap", False)) and tensor > 1 and bool(sequence)
        if getattr(overlap, "overlap_param_gather_with_optimizer_step", None):
            optimizer.overlap_param_gather_with_optimizer_step = True
    found = refusals(Plain(optimizer), Plain(ddp), Plain(model))
    if str(getattr(optimizer, "optimizer", None) or "adam") not in ("adam", "sgd", "None", "stand-in"):
        found["optimizer"] = f"is {optimizer.optimizer!r}; a step of it is not one on each element alone"
    if config.peft is not None:
        found["peft"] = "parameters that are not trained are in no buffer"
    for pattern, what, why in (
        (STATE_SPACE, "hybrid layers", "models of this family have layers of several kinds"),
        (SEVERAL_STACKS, "several stacks", "models of this family have an encoder besides the decoder"),
    ):
        if pattern.search(name):
            found.setdefault(what, why)
    return found


def _spread(precision: Any, model: Any, optimizer: Any, ddp: Any) -> None:
    """Megatron-Bridge sets each field of the precision on the configurations that have one of that name."""
    if precision is None:
        return
    values = {name: value for name, value in vars(precision).items() if not name.startswith("_")}
    values["fp8_param"] = values.get("fp8_param_gather")
    values["fp4_param"] = values.get("fp4_param_gather")
    for target, table in ((model, StandIn.known.model), (optimizer, StandIn.known.optimizer), (ddp, StandIn.known.ddp)):
        for name, value in values.items():
            if name in table and value is not None:
                setattr(target, name, value)


def commit_of(checkout: Path) -> str:
    """What is checked out; empty where that is not known."""
    asked = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bridge", type=Path, required=True, help="a checkout of NVIDIA-NeMo/Megatron-Bridge")
    parser.add_argument("--megatron", type=Path, required=True, help="a checkout of NVIDIA/Megatron-LM")
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args()
    for checkout, part in ((options.bridge, "src/megatron/bridge/recipes"), (options.megatron, "megatron/core")):
        if not (checkout / part).is_dir():
            print(f"error: {checkout} is no checkout of it: {part} is missing", file=sys.stderr)
            return 2
    install(options.bridge.resolve(), options.megatron.resolve())
    looked = list(recipes(options.bridge.resolve() / "src"))
    found = [each for each in looked if isinstance(each, Recipe)]
    errors = [each for each in looked if isinstance(each, str)]
    report: dict[str, Any] = {
        "commits": {"Megatron-Bridge": commit_of(options.bridge), "Megatron-LM": commit_of(options.megatron)},
        "kinds": {},
        "recipes": [{"kind": each.kind, "name": each.name, "refused": each.refused} for each in found],
        "errors": errors,
    }
    for kind in PACKAGES:
        ours = [each for each in found if each.kind == kind]
        accepted = sum(not each.refused for each in ours)
        needs = Counter(name for each in ours for name in each.refused)
        report["kinds"][kind] = {"recipes": len(ours), "accepted": accepted, "refused_by": dict(needs.most_common())}
        print(f"{kind}: {accepted} of {len(ours)} recipes accepted ({100 * accepted / max(1, len(ours)):.0f} %)")
        for name, count in needs.most_common():
            print(f"  {name:<46} {count:>4}  {100 * count / len(ours):>3.0f} %")
    print(f"{len(errors)} could not be looked at")
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
