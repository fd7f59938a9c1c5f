"""What `liver plan memory` counts: the sizes of models that people train, and what they must add up to."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liver_core.layout import ParallelLayout
from liver_core.memory.device_memory import TrainingShape, handoff_memory, rank_memory
from liver_core.memory.memory_placement import areas
from liver_core.memory.overheads import NCCL_UNSHARED_BYTES, DeviceOverheads
from liver_core.memory.transformer_shape import TransformerShape, activation_bytes, manifest_of

GB = 10**9
H100_80 = 81_559 * 2**20
SEVEN = TrainingShape(TransformerShape(32, 4096, 32, 32, 11008, 32000, 4096), 1, 96)
SEVENTY = TrainingShape(TransformerShape(80, 8192, 64, 8, 28672, 32000, 4096), 1, 1344)
# Worked out by hand from the sizes of Llama 2: GB of weights, gradients and optimizer; of a slot; of activations and
# context; of the next world; of all without NCCL, with a ring of two slots.
BY_HAND = [
    (SEVEN, "TP2xDP4", "TP2xDP2", 30.3, 3.4, 9.5, 40.4, 87),
    (SEVEN, "DP8", "DP4", 50.6, 3.4, 18.5, 60.7, 137),
    (SEVENTY, "TP8xPP2xDP4", "TP8xPP2xDP3", 38.8, 4.3, 11.5, 43.1, 102),
    (SEVENTY, "TP8xPP4xDP8", "TP8xPP4xDP7", 16.2, 1.1, 11.5, 16.6, 46),
]
# What of the next world waits on the device, GB there with 4 GB of NCCL, GB in host memory.
WAITING_BY_HAND = [
    (SEVEN, "TP2xDP4", "TP2xDP2", ["master", "exp_avg", "exp_avg_sq"], 71, 6.7),
    (SEVENTY, "TP8xPP2xDP4", "TP8xPP2xDP3", ["master"], 69, 17.3),
]


@pytest.mark.parametrize(("training", "source", "target", "state", "slot", "beside", "following", "whole"), BY_HAND)
def test_sizes_are_those_worked_out_by_hand(training, source, target, state, slot, beside, following, whole):
    found = _handoff(training, source, target)
    present = found.present
    counted = (
        present.state,
        found.ring / 2,
        present.activations + present.context,
        found.following.state,
        found.device_bytes(found.choices[0]) - 2 * present.nccl,
    )
    assert [each / GB for each in counted] == pytest.approx([state, slot, beside, following, whole], rel=0.1)


@pytest.mark.parametrize(("training", "source", "target", "on_device", "device", "host"), WAITING_BY_HAND)
def test_what_waits_in_host_memory_is_worked_out_by_hand(training, source, target, on_device, device, host):
    found = _handoff(training, source, target)
    [waits] = [each for each in found.choices if [area.name for area in each.on_device] == on_device]
    assert [found.device_bytes(waits) / GB, waits.host_bytes / GB] == pytest.approx([device, host], rel=0.1)


def test_a_pure_data_parallel_seven_billion_does_not_fit_beside_itself_even_with_shared_communicators():
    found = _handoff(SEVEN, "DP8", "DP4")
    assert all(found.device_bytes(waits) > H100_80 for waits in found.choices[:-1])


def test_communicators_of_each_group_alone_cost_a_job_its_room():
    unshared = DeviceOverheads(nccl_per_world=NCCL_UNSHARED_BYTES)
    shared = _handoff(SEVEN, "TP2xDP4", "TP2xDP2")
    alone = _handoff(SEVEN, "TP2xDP4", "TP2xDP2", overheads=unshared)
    assert shared.waits and alone.waits
    assert alone.waits.device_bytes < shared.waits.device_bytes
    assert alone.device_bytes(alone.choices[0]) - shared.device_bytes(shared.choices[0]) == 10 * GB


def test_a_world_of_one_rank_has_no_communicator():
    assert rank_memory(SEVEN, ParallelLayout(), DeviceOverheads()).nccl == 0


def test_measured_activations_replace_the_estimate():
    measured = replace(SEVEN, activations=3 * GB)
    assert rank_memory(measured, ParallelLayout(tp=2), DeviceOverheads()).activations == 3 * GB


def test_a_next_world_that_does_not_fit_alone_is_refused_by_its_name():
    found = _handoff(SEVEN, "TP2xDP4", "DP2")
    assert found.waits is None
    assert "TP1xPP1xDP2" in found.refusal


@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2, 3]),
    micro=st.sampled_from([1, 2]),
    host=st.integers(0, 60 * GB),
    device=st.integers(10 * GB, 200 * GB),
)
@settings(max_examples=60, deadline=None)
def test_what_is_planned_never_exceeds_the_device_nor_the_host(tp, pp, dp, micro, host, device):
    training = replace(SEVEN, micro_batch=micro)
    target = ParallelLayout(tp=4, dp=2)
    found = handoff_memory(training, ParallelLayout(tp=tp, pp=pp, dp=dp), target, device_bytes=device, host_bytes=host)
    if found.waits is None:
        assert found.refusal
    else:
        assert found.device_bytes(found.waits) <= device
        assert found.waits.host_bytes <= host
        assert found.following.total <= device


@given(tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2, 4, 8]), dp=st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_no_stage_needs_more_than_the_rank_that_is_shown(tp, pp, dp):
    layout = ParallelLayout(tp=tp, pp=pp, dp=dp)
    shown = rank_memory(SEVENTY, layout, DeviceOverheads())
    micro_batches = SEVENTY.global_batch // dp
    for stage in range(pp):
        state = sum(area.device_bytes for area in areas(manifest_of(SEVENTY.model), layout, stage))
        kept = activation_bytes(SEVENTY.model, layout, stage=stage, micro_batch=1, micro_batches=micro_batches)
        assert state + kept <= shown.state + shown.activations


def _handoff(training, source, target, **more):
    layouts = (ParallelLayout.parse(source), ParallelLayout.parse(target))
    return handoff_memory(training, *layouts, device_bytes=H100_80, **more)
