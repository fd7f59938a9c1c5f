"""A region in several pieces of memory is, to all that reads and writes it, the region in one piece."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from liver_core.certificate import CertificatePlan
from liver_core.certificate.certificate_plan import _keys
from liver_core.certificate.on_device import device_totals
from liver_core.device.region import Region, RegionError
from liver_core.layout import Box, ResidentBox
from liver_core.reshard.plan import CopyRuns
from liver_core.transport.protocol import Read, TransportError
from liver_core.transport.regions import PieceSpec, RegionSpec, Registered, check_reads, copy_runs
from tests.liver_core.device.regions import cut_region, joined

NUMEL = 60
cuts = st.lists(st.integers(1, NUMEL - 1), max_size=5)


@st.composite
def some_runs(draw) -> tuple[CopyRuns, ...]:
    """Runs inside a region of NUMEL elements, disjoint in the target."""
    runs, at = [], 0
    while at < NUMEL and (not runs or draw(st.booleans())):
        length = draw(st.integers(1, 7))
        count, wide, apart = draw(st.integers(1, 4)), draw(st.integers(0, 5)), draw(st.integers(0, 3))
        strides = (length + wide, length + apart) if count > 1 else (0, 0)
        start = draw(st.integers(0, 9))
        run = CopyRuns(start, at, length, count, *strides)
        if max(run.source_stop, run.target_stop) > NUMEL:
            break
        runs.append(run)
        at = run.target_stop + draw(st.integers(0, 3))
    return tuple(runs)


def copied(runs: tuple[CopyRuns, ...], source: torch.Tensor) -> torch.Tensor:
    target = torch.zeros_like(source)
    for run in runs:
        for here, there, length in run.each():
            target[there : there + length] = source[here : here + length]
    return target


@given(some_runs(), cuts, cuts)
def test_copies_in_a_process_are_those_of_one_piece(runs, source_cuts, target_cuts):
    source = torch.arange(1.0, NUMEL + 1)
    target = cut_region(torch.zeros(NUMEL), target_cuts)
    moved = copy_runs(Read(0, "master", runs), cut_region(source, source_cuts), target)
    assert torch.equal(joined(target), copied(runs, source))
    assert moved == 4 * sum(run.elements for run in runs)


@given(some_runs(), cuts, cuts, st.data())
def test_bytes_of_a_read_are_those_of_one_piece_also_where_dtypes_change(runs, source_cuts, target_cuts, data):
    """Each element has one dtype at both ends, as a parameter has; the pieces at the ends differ."""
    wide = sorted(data.draw(st.sets(st.integers(1, NUMEL - 1), max_size=2)))
    runs = tuple(
        run for run in runs if run.source_offset == run.target_offset and run.source_stride == run.target_stride
    )
    source, target = (mixed(each, wide, fill) for each, fill in ((source_cuts, 1), (target_cuts, 0)))
    read, peer = Read(7, "grad", runs), Registered.of(source)
    spec = RegionSpec.from_json(peer.spec.to_json())
    (table,) = check_reads([read], {7: {"grad": spec}}, {"grad": Registered.of(target)})
    ours = Registered.of(target).memory
    for (there, s, length), (here, t, _) in zip(
        peer.memory.located(table[:, [0, 2]]), ours.located(table[:, 1:]), strict=True
    ):
        ours.views[here][t : t + length] = peer.memory.views[there][s : s + length]
    expected = mixed([], wide, 0)
    copy_runs(read, mixed([], wide, 1), expected)
    assert [value for tensor in target.tensors for value in tensor.tolist()] == [
        value for tensor in expected.tensors for value in tensor.tolist()
    ]


def mixed(cut: list[int], wide: list[int], fill: int) -> Region:
    """bf16 and fp32 in turn, changing at `wide`; elements are numbered where there is a `fill`."""
    edges = sorted({0, NUMEL, *cut, *wide})
    tensors = []
    for start, stop in pairwise(edges):
        dtype = torch.bfloat16 if sum(edge <= start for edge in wide) % 2 else torch.float32
        tensors.append((fill * torch.arange(start + 1, stop + 1)).to(dtype))
    return Region(tensors)


def test_a_read_between_dtypes_is_refused_wherever_in_the_region_they_differ():
    source, target = RegionSpec.of(mixed([], [10, 20], 0)), Registered.of(mixed([], [10, 21], 0))
    same, other = CopyRuns(0, 0, 20), CopyRuns(15, 15, 6)
    check_reads([Read(0, "grad", (same,))], {0: {"grad": source}}, {"grad": target})
    with pytest.raises(TransportError, match="peer has float32, target is bfloat16"):
        check_reads([Read(0, "grad", (same, other))], {0: {"grad": source}}, {"grad": target})


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([], "1 to 65536 pieces"),
        ([["4", "float32", 4], [4, "float32", 4]], "must ascend"),
        ([[-1, "float32", 4]], "must ascend"),
        ([[4, "float32", 0]], "must have bytes"),
    ],
)
def test_what_no_region_publishes_is_refused(pieces, text: str):
    with pytest.raises(ValueError, match=text):
        RegionSpec.from_json(pieces)


@given(cuts, st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.booleans())
def test_a_certificate_is_that_of_one_piece(cut, dtype, paired):
    """Pieces end between boxes: every third row of the last parameter begins one more box."""
    boxes = [ResidentBox("a", Box((2, 0), (5, 4)), 0), ResidentBox("b", Box((4,), (16,)), 16)]
    boxes += [ResidentBox("a", Box((row, 0), (row + 1, 4)), 28 + 4 * (row - 5)) for row in range(5, 12)]
    starts = {box.offset for box in boxes} - {0}
    plan = CertificatePlan(boxes, {"a": (12, 4), "b": (20,)}, paired={"a", "b"} if paired else ())
    whole = torch.randn(NUMEL, generator=torch.Generator().manual_seed(3)).to(dtype)
    region = cut_region(whole, [at for at in cut if at in starts or at >= 56])
    expected = plan.sums(whole, "grad").tolist()
    assert plan.sums(region, "grad").tolist() == expected
    assert device_totals(region.tensors, plan._batches_of(region), _keys(plan.parameters, "grad")) == expected


def test_a_certificate_of_several_dtypes_is_that_of_each_alone():
    boxes = [ResidentBox("a", Box((0,), (10,)), 0), ResidentBox("b", Box((0,), (10,)), 10)]
    plan, region = CertificatePlan(boxes, {"a": (10,), "b": (10,)}, paired={"a", "b"}), mixed([], [10], 1)
    alone = [
        plan.sums(torch.arange(1, NUMEL + 1).to(dtype), "grad")[at]
        for at, dtype in enumerate((torch.float32, torch.bfloat16))
    ]
    assert plan.sums(region, "grad").tolist() == np.array(alone).tolist()
    assert (
        device_totals(region.tensors, plan._batches_of(region), _keys(plan.parameters, "grad"))
        == np.array(alone).tolist()
    )


def test_a_piece_that_ends_inside_a_box_is_refused():
    plan = CertificatePlan([ResidentBox("a", Box((0,), (10,)), 4)], {"a": (10,)})
    with pytest.raises(ValueError, match="does not end in the piece that ends at 8"):
        plan.sums(cut_region(torch.zeros(20), [8]), "master")


def test_windows_are_views_of_one_piece():
    region = cut_region(torch.arange(10.0), [4])
    region.window(5, 7).zero_()
    assert joined(region).tolist() == [0, 1, 2, 3, 4, 0, 0, 7, 8, 9]
    assert [(start, stop, part.tolist()) for start, stop, part in region.over(3, 6)] == [(3, 4, [3]), (4, 6, [4, 0])]
    for start, stop in ((3, 5), (10, 11), (-1, 2), (2, 1)):
        with pytest.raises(RegionError):
            region.window(start, stop)


def test_neighbours_in_memory_are_one_piece():
    memory = torch.arange(12.0)
    assert len(Region([memory[0:4], memory[4:4], memory[4:9], memory[9:12]]).pieces) == 1
    assert len(Region([memory[0:4], memory[5:9]]).pieces) == 2
    assert len(Region([memory[4:8], memory[0:4]]).pieces) == 2
    assert len(Region([memory[0:4], memory[4:8].view(torch.int32)]).pieces) == 2
    for wrong in ([], [memory.view(3, 4)], [memory[::2]]):
        with pytest.raises(RegionError):
            Region(wrong)


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from([torch.float32, torch.bfloat16])), min_size=1, max_size=6))
def test_memory_of_its_own_is_one_allocation_with_a_piece_for_each_run_of_a_dtype(parts):
    region = Region.zeros(parts, torch.device("cpu"))
    changes = sum(one[1] != other[1] for one, other in pairwise(parts))
    assert len(region.pieces) == changes + 1 and region.numel == sum(numel for numel, _ in parts)
    assert len({tensor.untyped_storage()._cdata for tensor in region.tensors}) == 1
    assert region.zeros_like().tensors[0].data_ptr() != region.tensors[0].data_ptr()
    assert RegionSpec.of(region.zeros_like()).pieces == RegionSpec.of(region).pieces
    assert RegionSpec.of(region).pieces[0] == PieceSpec(
        region.pieces[0].stop, str(parts[0][1])[6:], parts[0][1].itemsize
    )


@given(cuts, cuts)
def test_copying_a_whole_region_does_not_ask_how_it_is_cut(one, other):
    source, target = cut_region(torch.arange(float(NUMEL)), one), cut_region(torch.zeros(NUMEL), other)
    target.copy_(source)
    assert torch.equal(joined(target), joined(source))
    with pytest.raises(RegionError, match="59 elements"):
        target.copy_(Region([torch.zeros(59)]))
