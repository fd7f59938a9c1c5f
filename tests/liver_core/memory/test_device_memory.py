"""What `liver plan memory` counts: the sizes of models that people train, and what they must add up to."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liver_core.layout import ParallelLayout
from liver_core.layout.experts import ExpertShape
from liver_core.memory.device_memory import (
    HOST_BYTES_UNLIMITED,
    HandoffMemory,
    RankMemory,
    TrainingShape,
    handoff_memory,
    in_turn,
    rank_memory,
)
from liver_core.memory.memory_placement import Area, MemoryPlacement, Streaming, areas
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


def test_experts_take_their_share_of_expert_parallel_ranks():
    """Mixtral 8x7B: 1.6 billion parameters on every rank, and one of eight experts' 5.6 billion; two bytes of weights,
    four of gradients, twelve of the optimizer, of the former an eighth."""
    mixtral = TransformerShape(32, 4096, 32, 8, 14336, 32000, 4096, experts=ExpertShape(8, 14336, 2, (True,) * 32))
    found = rank_memory(TrainingShape(mixtral, 1, 96), ParallelLayout(dp=8, ep=8), DeviceOverheads())
    counted = [each / GB for each in (found.weights, found.gradients, found.optimizer)]
    assert counted == pytest.approx([2 * 7.24, 4 * 7.24, 12 * (5.64 + 1.6 / 8)], rel=0.01)


def test_the_fullest_stage_may_be_one_between_the_first_and_the_last():
    """Only the third of four layers has experts, and they are large."""
    experts = ExpertShape(8, 4096, 1, (False, False, True, False))
    shape = TrainingShape(TransformerShape(4, 64, 4, 4, 64, 128, 16, experts=experts), 1, 4)
    assert rank_memory(shape, ParallelLayout(pp=4), DeviceOverheads()).stage == 2
    dense = TrainingShape(replace(shape.model, experts=None), 1, 4)
    assert rank_memory(dense, ParallelLayout(pp=4), DeviceOverheads()).stage in (0, 3)


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


# Six layers, of which each has 128 x (128 + 256 + 512 + 256) elements and two norms of 128: 147 712. The embedding and
# the output layer have 512 x 128. So a third of the model has 2 x 147 712 + 65 536 = 360 960 elements, and the last
# third, with the final norm, 361 088: multiples of 128, so that nothing is padded.
SMALL = TrainingShape(TransformerShape(6, 128, 4, 2, 256, 512, 32), 2, 8)
FIRST_THIRD, LAST_THIRD = 360_960, 361_088
ROUND = DeviceOverheads(context=1_000, workspaces=200, nccl_per_world=30, certificate=7, landing=3, relay=2)
# A micro-batch of two sequences of 32 takes 2 x 32 x 128 x 34 bytes in a layer.
IN_A_LAYER = 278_528
LAST_STAGE = 2 * IN_A_LAYER + 262_144


@pytest.mark.parametrize(
    ("training", "layout", "expected"),
    [
        # Two micro-batches of each rank: the first stage keeps both, of two layers.
        (
            SMALL,
            "PP3xDP2",
            RankMemory(0, 721_920, 1_443_840, 3 * 721_920, 180_480, 721_920, 2 * 2 * IN_A_LAYER, 0, 1_200, 30),
        ),
        # Four micro-batches, of which the first of three stages keeps three.
        (
            SMALL,
            "PP3",
            RankMemory(0, 721_920, 1_443_840, 4_331_520, 360_960, 1_443_840, 2 * 3 * IN_A_LAYER, 0, 1_200, 30),
        ),
        # Five sequences make two whole micro-batches.
        (
            replace(SMALL, global_batch=5),
            "PP3",
            RankMemory(0, 721_920, 1_443_840, 4_331_520, 360_960, 1_443_840, 2 * 2 * IN_A_LAYER, 0, 1_200, 30),
        ),
        # With one micro-batch all stages keep as much, and the last one has the logits, 8 bytes for each of 64 x 512.
        *(
            (
                replace(SMALL, global_batch=batch),
                "PP3",
                RankMemory(
                    2, 722_176, 1_444_352, 4_333_056, 361_088, 1_444_352, 2 * IN_A_LAYER + 262_144, 0, 1_200, 30
                ),
            )
            for batch in (1, 2)
        ),
        # All of the model on one rank: 6 x 147 712 + 2 x 65 536 + 128 elements, without communicators.
        (
            replace(SMALL, activations=0),
            "TP1",
            RankMemory(0, 2_034_944, 4_069_888, 12_209_664, 1_017_472, 4_069_888, 0, 0, 1_200, 0),
        ),
    ],
)
def test_the_fullest_rank_of_a_small_model_by_hand(training, layout, expected):
    found = rank_memory(training, ParallelLayout.parse(layout), ROUND)
    assert found == expected
    assert found.state == found.weights + found.gradients + found.optimizer
    assert found.total == found.state + found.activations + found.context + found.nccl


# A rank of PP3xDP2: 2 + 4 + 3 x 2 bytes for each of 360 960 elements, then activations, context, communicators.
PRESENT_STATE = 12 * FIRST_THIRD
PRESENT = PRESENT_STATE + 4 * IN_A_LAYER + 1_200 + 30
# A rank of PP3: 2 + 4 + 3 x 4 bytes for each.
FOLLOWING_STATE = 18 * FIRST_THIRD
FOLLOWING = FOLLOWING_STATE + 6 * IN_A_LAYER + 1_200 + 30
REGION, WEIGHTS = 4 * FIRST_THIRD, 2 * FIRST_THIRD
# Counters, and two slots with a counter, a header and the gradients of half of 360 960 elements.
RING = 8 + 2 * (8 + 16_384 + 2 * FIRST_THIRD)
# Four temporaries of the shortest tile, in fp32; one more for each kind that waits in host memory.
TILE = 65_536 * 4
# The present world, the next one's communicators, the certificate and where reads land.
TRAINING = PRESENT + 30 + 7 + 5


def _small(device: int, host: int = HOST_BYTES_UNLIMITED) -> HandoffMemory:
    layouts = ParallelLayout(pp=3, dp=2), ParallelLayout(pp=3)
    return handoff_memory(SMALL, *layouts, device_bytes=device, host_bytes=host, overheads=ROUND)


def _on_device(found: HandoffMemory) -> list[str]:
    assert found.waits is not None
    return [area.name for area in found.waits.on_device]


def test_what_a_handoff_takes_on_the_device_by_hand():
    found = _small(10**9)
    assert (found.present.total, found.following.total) == (PRESENT, FOLLOWING)
    assert (found.certificate, found.landing, found.relay, found.ring) == (7, 3, 2, RING)
    assert found.stream == Streaming(RING, 65_536)
    assert [found.device_bytes(waits) for waits in found.choices] == [
        TRAINING + RING + 4 * TILE + FOLLOWING_STATE,
        TRAINING + RING + 4 * TILE + FOLLOWING_STATE - WEIGHTS,
        TRAINING + RING + 5 * TILE + 3 * REGION,
        TRAINING + RING + 6 * TILE + 2 * REGION,
        TRAINING + RING + 7 * TILE + REGION,
        TRAINING + RING + 8 * TILE,
    ]
    copied = replace(found, stream=None)
    assert copied.ring == 0
    assert copied.device_bytes(found.choices[0]) == TRAINING + FOLLOWING_STATE
    # Nothing waits on the device: it is fullest after the cutover, with the communicators of both worlds.
    assert copied.device_bytes(found.choices[-1]) == FOLLOWING + 30 > TRAINING


def test_a_byte_decides_what_waits_on_the_device_and_whether_state_is_streamed():
    whole = TRAINING + RING + 4 * TILE + FOLLOWING_STATE
    everything = ["master", "exp_avg", "exp_avg_sq", "grad", "weights"]
    exact = _small(whole, 0)
    assert (_on_device(exact), exact.stream, exact.refusal) == (everything, Streaming(RING, 65_536), "")
    # Weights take nothing in host memory.
    for device in (whole - 1, whole - WEIGHTS):
        short = _small(device, 0)
        assert (_on_device(short), short.stream) == (everything[:-1], Streaming(RING, 65_536))
    # One byte less, and without host memory there is room only where nothing is streamed.
    copied = _small(whole - WEIGHTS - 1, 0)
    assert (_on_device(copied), copied.stream, copied.ring) == (everything, None, 0)
    spilled = _small(whole - WEIGHTS - 1)
    assert (_on_device(spilled), spilled.stream) == ([*everything[:3], "weights"], Streaming(RING, 65_536))


def test_where_a_region_is_shorter_than_the_least_tile_a_tile_is_as_long_as_the_region():
    tiny = TrainingShape(TransformerShape(1, 64, 1, 1, 64, 8, 8), 1, 1)
    found = handoff_memory(tiny, ParallelLayout(dp=2), ParallelLayout(tp=2), device_bytes=10**9, overheads=ROUND)
    assert found.stream is not None
    assert found.stream.tile_elements == found.following.elements < 65_536


def test_a_handoff_that_does_not_fit_is_refused_with_what_is_too_small():
    # The next world alone, with the communicators of both.
    least = FOLLOWING + 30
    refused = _small(least - 1)
    assert refused.waits is None and refused.stream is not None
    assert refused.refusal == f"TP1xPP3xDP1 alone needs {least} bytes on a rank, a device has {least - 1}"
    # With a byte more, one region and the weights wait on the device, the three others in host memory.
    fits = _small(least, 3 * REGION)
    assert (_on_device(fits), fits.stream) == (["master", "weights"], None)
    short = _small(least, 3 * REGION - 1)
    assert short.waits is None
    assert short.refusal == (
        f"host_bytes_max: the next world needs {3 * REGION} bytes of host memory on rank 0 beside {least - TRAINING} "
        f"on the device, budget is {3 * REGION - 1}"
    )


def test_the_world_that_trains_is_refused_by_its_own_name_and_first():
    source = FOLLOWING + 30 + 7 + 5
    for device in (1, source - 1):
        found = handoff_memory(
            SMALL, ParallelLayout(pp=3), ParallelLayout(pp=3, dp=2), device_bytes=device, overheads=ROUND
        )
        assert found.refusal == f"TP1xPP3xDP1 alone needs {source} bytes on a rank, a device has {device}"
    at_the_limit = handoff_memory(
        SMALL, ParallelLayout(pp=3), ParallelLayout(pp=3, dp=2), device_bytes=source, overheads=ROUND
    )
    assert "alone" not in at_the_limit.refusal


def test_without_figures_of_the_device_the_usual_ones_are_taken():
    layouts = ParallelLayout(pp=3, dp=2), ParallelLayout(pp=3)
    usual = handoff_memory(SMALL, *layouts, device_bytes=H100_80)
    assert usual == handoff_memory(SMALL, *layouts, device_bytes=H100_80, overheads=DeviceOverheads())
    assert (usual.present.context, usual.present.nccl) == (500_000_000 + 2 * 32 * 2**20, 2 * 10**9)


def test_the_choices_leave_out_one_area_after_the_other_from_the_least_wanted_on():
    one, two = Area("one", 1, 1), Area("two", 2, 2)
    assert in_turn((one, two)) == (
        MemoryPlacement((one, two), ()),
        MemoryPlacement((one,), (two,)),
        MemoryPlacement((), (one, two)),
    )


def _handoff(training, source, target, **more):
    layouts = (ParallelLayout.parse(source), ParallelLayout.parse(target))
    return handoff_memory(training, *layouts, device_bytes=H100_80, **more)
