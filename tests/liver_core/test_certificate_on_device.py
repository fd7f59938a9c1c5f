"""The arithmetic for regions on a device, run here on regions in host memory: bit for bit what numpy finds there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from liver_core.certificate import certificate_plan as plans
from liver_core.certificate.batches import NARROW, NARROW_PART, batches_of
from liver_core.certificate.mixing import MASK
from liver_core.certificate.on_device import device_totals
from liver_core.certificate.on_host import CHUNK, host_totals
from liver_core.certificate.slabs import Slab, in_pairs, slabs_of
from liver_core.layout import Box, ResidentBox
from liver_core.memory.overheads import CERTIFICATE_TENSORS, CERTIFICATE_WORDS
from tests.liver_core.peak_memory import PeakMemory

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8)
words = st.integers(0, MASK)


def random_region(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits, also those of NaN."""
    size = torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(0, 256, (numel * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return bits.view(dtype)


@st.composite
def boxes_in(draw) -> tuple[Box, tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    edges = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    starts = tuple(min(start, size - 1) for (start, _), size in zip(edges, shape, strict=True))
    stops = tuple(max(stop, start + 1) for (_, stop), start in zip(edges, starts, strict=True))
    return Box(starts, stops), shape


@given(
    case=boxes_in(), dtype=st.sampled_from(DTYPES), key=words, padding=st.integers(0, 3), most=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_box_of_any_dtype_has_the_sum_that_numpy_finds(case, dtype, key, padding, most, seed):
    box, shape = case
    slabs = list(slabs_of(ResidentBox("w", box, padding), shape, 0))
    numel = sum(slab.rows * slab.width for slab in slabs)
    region = random_region(padding + numel + 2, dtype, seed)
    assert device_totals([region], batches_of(slabs, most), (key,)) == host_totals([region], slabs, (key,))


@given(
    rows=st.integers(1, 9), width=st.integers(1, 6), start=st.integers(0, 50), between=st.integers(0, 5), key=words,
    begin=st.integers(0, 2), most=st.integers(1, 20), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_pairs_too_wherever_the_region_begins(rows, width, start, between, key, begin, most, seed):
    slab = in_pairs(Slab(0, False, 2, 2 * start, rows, 2 * width, 2 * (width + between)))
    region = random_region(begin + 2 + 2 * rows * width + 1, torch.float32, seed)[begin:]
    assert device_totals([region], batches_of([slab], most), (key,)) == host_totals([region], [slab], (key,))


@pytest.mark.parametrize("width", [1, CHUNK - 1, CHUNK + 1, 3 * CHUNK])
def test_large_regions_of_several_parameters_have_the_same_sums_at_once(width):
    rows = -(-CERTIFICATE_WORDS // width) + 1 if width == 3 * CHUNK else 40
    slabs = [Slab(1, False, 0, 5, rows, width, width + 3), Slab(0, False, rows * width, 0, 1, width, 0)]
    region = random_region((rows + 1) * width, torch.float32, width)
    keys = (MASK - 3, 0x9E3779B97F4A7C15, 7)
    found = device_totals([region], batches_of(slabs), keys)
    assert found == host_totals([region], slabs, keys) and found[2] == 0


@pytest.mark.parametrize(("width", "most"), [(NARROW - 1, 1024 // NARROW_PART), (NARROW, 1024)])
def test_a_batch_of_narrow_pieces_has_fewer_words_since_what_is_known_of_each_takes_memory_too(width: int, most: int):
    batches = batches_of([Slab(0, False, 0, 0, 1000, width, width)], 1024)
    assert sum(batch.pieces for batch in batches) == 1000
    assert {batch.pieces for batch in batches[:-1]} == {most // width}


def test_no_slab_is_a_sum_of_zero():
    assert device_totals([torch.zeros(0)], batches_of([]), (1, 2)) == [0, 0]


def test_a_region_that_is_not_in_host_memory_stays_where_it_is(monkeypatch):
    """Only the numbers are read."""
    asked = []
    monkeypatch.setattr(
        plans, "device_totals", lambda pieces, batches, keys: asked.append(pieces[0].device.type) or [5]
    )
    monkeypatch.setattr(plans, "host_totals", lambda *_: pytest.fail("it would be copied to the host"))
    plan = plans.CertificatePlan([ResidentBox("w", Box((0,), (8,)), 0)], {"w": (8,)}, {"w": 3})
    assert plan.sums(torch.empty(8, device="meta"), "master").tolist() == [15]
    assert asked == ["meta"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_left_to_make_for_the_first_sum_which_may_be_in_a_pause(monkeypatch, dtype):
    plan = plans.CertificatePlan([ResidentBox("w", Box((0,), (8,)), 0)], {"w": (8,)}, paired=["w"])
    region = torch.empty(8, device="meta", dtype=dtype)
    plan.get_ready([torch.empty(8, dtype=dtype), region])
    monkeypatch.setattr(plans, "batches_of", lambda _: pytest.fail("made late"))
    monkeypatch.setattr(plans, "device_totals", lambda pieces, batches, keys: [len(batches)])
    assert plan.sums(region, "master").tolist() == [1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "tensors"), [(1, 8 * CHUNK, 3), (8 * CHUNK // 64, 64, 3), (8 * CHUNK, 1, 5)])
def test_no_more_memory_is_taken_beside_the_region_than_is_planned(dtype, rows, width, tensors):
    region = random_region(rows * width, dtype, 7)
    slab = Slab(0, False, 0, 0, rows, width, width + 1)
    with PeakMemory(known=[region]) as peak:
        device_totals([region], batches_of([slab], CHUNK), [12345])
    assert tensors <= CERTIFICATE_TENSORS
    assert peak.peak <= 8 * CHUNK * (tensors + 0.1)


def layers(count: int) -> list[Slab]:
    """Of a small model: matrices that are whole, cut by rows and cut by columns, and short vectors, for each layer."""
    made, offset = [], 0
    for layer in range(count):
        for name, (rows, width, stride) in enumerate(((1, 2048, 0), (1, 3000, 0), (16, 48, 96), (1, 64, 0), (1, 7, 0))):
            index = 5 * layer + name
            made.append(Slab(index, False, offset, 11 * index, rows, width, stride))
            offset += rows * width
    return made


def numbers(slabs: list[Slab]) -> tuple[torch.Tensor, tuple[int, ...]]:
    numel = max(slab.offset + slab.rows * slab.width for slab in slabs)
    return random_region(numel, torch.float32, 5), tuple((slab.index * 0x9E3779B97F4A7C15) & MASK for slab in slabs)


@pytest.mark.parametrize("most", [100, 5000, CERTIFICATE_WORDS])
def test_parameters_that_are_summed_together_have_sums_of_their_own(most):
    slabs = layers(12)
    region, keys = numbers(slabs)
    found = device_totals([region], batches_of(slabs, most), keys)
    assert found == host_totals([region], slabs, keys) and len(set(found)) == len(slabs)


def test_a_device_is_asked_as_often_for_forty_layers_as_for_four():
    """A handoff waits for every time."""
    asked = []
    for count in (4, 40):
        slabs = layers(count)
        region, keys = numbers(slabs)
        batches = batches_of(slabs)
        with Operations() as operations:
            device_totals([region], batches, keys)
        asked.append(operations.count)
    assert asked[1] - asked[0] == len(SLICED) * (40 - 4), "but for the views of what is put together"
    assert asked[0] < 250


SLICED = ("2048", "2048 of 3000", "952 of 3000", "48", "64", "7")


class Operations(TorchDispatchMode):
    """Counts what a device would be asked."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_much_memory_is_not_taken_for_many_short_rows_either():
    slabs = [Slab(0, False, 2 * at * CHUNK, 3 * at, 2 * CHUNK, 1, 5) for at in range(4)]
    region = random_region(8 * CHUNK, torch.float32, 7)
    with PeakMemory(known=[region]) as peak:
        found = device_totals([region], batches_of(slabs, CHUNK), [12345])
    assert found == host_totals([region], slabs, [12345])
    assert peak.peak <= 8 * CHUNK * CERTIFICATE_TENSORS
