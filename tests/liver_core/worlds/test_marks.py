"""Parameters of experts that Transformer Engine would make are marked as cut, as Megatron's own are. Its classes are
doubles here: they are known by their names."""

from __future__ import annotations

import pytest

from tests.cluster.real_ranks import run_alone

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


def test_grouped_experts_are_marked_along_the_dim_that_their_class_splits():
    assert run_alone(_marks) == {
        "fc1.weight0": (True, 0),
        "fc1.weight1": (True, 0),
        "fc1.bias0": (True, 0),
        "fc2.weight0": (True, 1),
        "fc2.weight1": (True, 1),
        "fc2.bias0": (False, None),
        "norm.weight0": (False, None),
    }


def _marks() -> dict[str, tuple[bool, int | None]]:
    import torch

    from liver_core.worlds.megatron import mark_tensor_parallel

    def grouped(name: str, **shapes: tuple[int, ...]) -> torch.nn.Module:
        made = type(name, (torch.nn.Module,), {})()
        for each, shape in shapes.items():
            made.register_parameter(each, torch.nn.Parameter(torch.zeros(shape)))
        return made

    model = torch.nn.ModuleDict(
        {
            "fc1": grouped("TEColumnParallelGroupedLinear", weight0=(8, 4), weight1=(8, 4), bias0=(8,)),
            "fc2": grouped("TERowParallelGroupedLinear", weight0=(4, 8), weight1=(4, 8), bias0=(4,)),
            "norm": grouped("TENorm", weight0=(4,)),
        }
    )
    mark_tensor_parallel(model)
    return {
        name: (getattr(parameter, "tensor_model_parallel", False), getattr(parameter, "partition_dim", None))
        for name, parameter in model.named_parameters()
    }
