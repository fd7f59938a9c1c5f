"""The certificate is the same for every way of laying state out, and different for anything else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liver_core.certificate import MASK, CertificatePlan, chained_sums
from liver_core.certificate.mixing import WEYL
from liver_core.certificate.on_host import CHUNK
from liver_core.layout import Box, ResidentBox, flat_range_to_boxes

SHAPES = {"w": (6, 10, 4), "b": (24,), "emb": (40, 12)}

shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)


@given(shape=shapes, seed=st.integers(0, 2**32 - 1), data=st.data())
def test_the_sum_does_not_depend_on_how_a_parameter_is_cut_into_boxes(shape, seed, data):
    whole = random_bits(math.prod(shape), seed)
    boxes = data.draw(cuts(shape))
    ranks = data.draw(st.lists(st.integers(0, 2), min_size=len(boxes), max_size=len(boxes)))
    parts = []
    for rank in range(3):
        mine = [box for box, owner in zip(boxes, ranks, strict=True) if owner == rank]
        region, resident = laid_out(whole, shape, mine, padding=rank)
        parts.append(certificate(region, resident, {"w": shape}, "master"))
    assert int(combine(parts)[0]) == int(sum_of(whole, shape))


@given(shape=shapes, cuts_at=st.lists(st.floats(0, 1), max_size=4), seed=st.integers(0, 2**32 - 1))
def test_flat_ranges_of_optimizer_shards_sum_to_the_whole(shape, cuts_at, seed):
    numel = math.prod(shape)
    whole = random_bits(numel, seed)
    edges = sorted({0, numel, *(int(cut * numel) for cut in cuts_at)})
    parts = []
    for start, stop in pairwise(edges):
        boxes = flat_range_to_boxes(shape, start, stop)
        region, resident = laid_out(whole, shape, list(boxes), padding=0)
        parts.append(certificate(region, resident, {"w": shape}, "master"))
    assert int(combine(parts)[0]) == int(sum_of(whole, shape))


@given(shape=shapes, seed=st.integers(0, 2**32 - 1))
def test_it_equals_a_plain_sum_over_elements(shape, seed):
    whole = random_bits(math.prod(shape), seed)
    assert int(sum_of(whole, shape)) == slow_sum(whole)


@pytest.mark.parametrize("width", [1, 3, CHUNK // 2, CHUNK // 2 + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_rows_of_any_length_around_the_chunk_are_summed_alike(width):
    shape = (5, width + 3)
    whole = random_bits(math.prod(shape), width)
    left = laid_out(whole, shape, [Box((0, 0), (5, 3))], padding=2)
    right = laid_out(whole, shape, [Box((0, 3), (5, width + 3))], padding=1)
    parts = [certificate(region, boxes, {"w": shape}, "master") for region, boxes in (left, right)]
    assert int(combine(parts)[0]) == int(sum_of(whole, shape)) == slow_sum(whole)


@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_exchanging_two_different_elements_changes_the_sum(seed, data):
    whole = random_bits(480, seed)
    i, j = data.draw(st.tuples(st.integers(0, 479), st.integers(0, 479)))
    changed = whole.clone()
    changed[i], changed[j] = whole[j].item(), whole[i].item()
    assert (sum_of(changed, (40, 12)) == sum_of(whole, (40, 12))) == torch.equal(changed, whole)


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32 - 1), at=st.integers(0, 479), bit=st.integers(0, 31))
def test_flipping_any_bit_changes_the_sum(seed, at, bit):
    whole = random_bits(480, seed)
    changed = whole.clone()
    changed[at] = int(np.int32(np.uint32(int(whole[at]) & 0xFFFFFFFF) ^ np.uint32(1 << bit)))
    assert sum_of(changed, (40, 12)) != sum_of(whole, (40, 12))


@given(permutation=st.permutations(range(24)))
def test_any_permutation_of_distinct_elements_changes_the_sum(permutation):
    whole = torch.arange(24, dtype=torch.float32)
    same = list(permutation) == list(range(24))
    assert (sum_of(whole[torch.tensor(permutation)], (24,)) == sum_of(whole, (24,))) == same


def test_structured_moves_that_cancel_in_linear_checksums_are_seen():
    whole = torch.zeros(64, 64)
    whole[10, 10] = whole[20, 20] = 1.0
    changed = torch.zeros(64, 64)
    changed[10, 20] = changed[20, 10] = 1.0
    assert sum_of(changed.view(-1), (64, 64)) != sum_of(whole.view(-1), (64, 64))
    assert sum_of(whole.t().contiguous().view(-1) + torch.eye(64).view(-1), (64, 64)) != sum_of(
        whole.view(-1), (64, 64)
    )


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 9), cut=st.integers(1, 5), padding=st.integers(0, 2))
def test_pairs_sum_alike_however_they_are_cut_and_to_words_of_two_elements(seed, rows, cut, padding):
    whole, shape = random_bits(12 * rows, seed), (rows, 12)
    boxes = [Box((0, 2 * cut), (rows, 12)), Box((0, 0), (rows, 2 * cut))]
    parts = []
    for box in boxes:
        region, resident = laid_out(whole, shape, [box], padding=2 * padding)
        parts.append(CertificatePlan(resident, {"w": shape}, paired={"w"}).sums(region, "master"))
    words = whole.view(torch.int64)
    assert int(combine(parts)[0]) == int(
        certificate(words, [ResidentBox("w", Box((0,), (6 * rows,)), 0)], {"w": (6 * rows,)}, "master")[0]
    )


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32 - 1), at=st.integers(0, 479), other=st.integers(0, 479), bit=st.integers(0, 31))
def test_a_flipped_bit_or_two_exchanged_elements_change_the_sum_of_pairs(seed, at, other, bit):
    whole, shape = random_bits(480, seed), (40, 12)
    plan = CertificatePlan([ResidentBox("w", Box((0, 0), shape), 0)], {"w": shape}, paired={"w"})
    flipped, exchanged = whole.clone(), whole.clone()
    flipped[at] = int(np.int32(np.uint32(int(whole[at]) & 0xFFFFFFFF) ^ np.uint32(1 << bit)))
    exchanged[at], exchanged[other] = whole[other].item(), whole[at].item()
    before = plan.sums(whole, "master")
    assert plan.sums(flipped, "master") != before
    assert (plan.sums(exchanged, "master") == before) == torch.equal(exchanged, whole)


@pytest.mark.parametrize(
    ("box", "offset", "shape"),
    [
        (Box((1,), (5,)), 0, (8,)), (Box((0,), (4,)), 1, (8,)), (Box((0,), (5,)), 0, (8,)),
        (Box((0, 0), (4, 2)), 0, (4, 5)),
    ],
    ids=["start", "offset", "width", "stride"],
)  # fmt: skip
def test_half_a_pair_in_a_box_is_refused(box: Box, offset: int, shape: tuple[int, ...]):
    with pytest.raises(ValueError, match="whole pairs"):
        CertificatePlan([ResidentBox("w", box, offset)], {"w": shape}, paired={"w"})
    CertificatePlan([ResidentBox("w", box, offset)], {"w": shape}, paired={"another"})


def test_a_region_of_an_odd_length_has_whole_pairs_before_its_last_element():
    region, boxes = torch.randn(9), [ResidentBox("w", Box((0,), (8,)), 0)]
    plan = CertificatePlan(boxes, {"w": (8,)}, paired={"w"})
    assert plan.sums(region, "master") == plan.sums(region[:8], "master")


def test_a_rank_that_holds_nothing_has_sums_of_zero_over_no_elements():
    plan = CertificatePlan([], SHAPES)
    assert (plan.elements, plan.sums(torch.zeros(0), "master").tolist()) == (0, [0, 0, 0])
    assert CertificatePlan([ResidentBox("w", Box((0, 0, 0), (2, 10, 4)), 0)], SHAPES).elements == 80


def test_other_widths_of_element_are_summed_one_by_one_also_where_pairs_are_wanted():
    boxes, region = [ResidentBox("w", Box((0,), (8,)), 0)], torch.randn(8, dtype=torch.float64)
    assert CertificatePlan(boxes, {"w": (8,)}, paired={"w"}).sums(region, "master") == certificate(
        region, boxes, {"w": (8,)}, "master"
    )


def test_zero_and_minus_zero_differ_and_so_do_payloads_of_nan():
    zero, minus = torch.zeros(24), torch.zeros(24)
    minus[5] = -0.0
    assert torch.equal(zero, minus)
    assert sum_of(zero, (24,)) != sum_of(minus, (24,))
    bits = torch.full((24,), 0x7FC00000, dtype=torch.int32)
    other = bits.clone()
    other[7] = 0x7FC00001
    assert sum_of(bits.view(torch.float32), (24,)) != sum_of(other.view(torch.float32), (24,))


def test_kinds_and_parameters_of_the_same_content_have_different_sums():
    region = torch.ones(48)
    plan = CertificatePlan(
        [ResidentBox("a", Box((0,), (24,)), 0), ResidentBox("b", Box((0,), (24,)), 24)], two := {"a": (24,), "b": (24,)}
    )
    assert plan.parameters == tuple(two)
    master, moment = plan.sums(region, "master"), plan.sums(region, "exp_avg")
    assert len({int(value) for value in (*master, *moment)}) == 4


def test_what_one_rank_counts_several_times_is_what_as_many_ranks_count_once():
    region, boxes = torch.randn(24), [ResidentBox("b", Box((0,), (24,)), 0)]
    once = CertificatePlan(boxes, {"b": (24,)}).sums(region, "master")
    thrice = CertificatePlan(boxes, {"b": (24,)}, {"b": 3}).sums(region, "master")
    assert (thrice == combine([once, once, once])).all()
    damaged = region.clone()
    damaged[5] += 1.0
    assert (thrice != combine([once, once, CertificatePlan(boxes, {"b": (24,)}).sums(damaged, "master")])).all()


def test_the_elements_of_each_parameter_are_counted_as_often_as_their_sums():
    boxes = [
        ResidentBox("w", Box((0, 0, 0), (2, 10, 4)), 0),
        ResidentBox("w", Box((5, 0, 0), (6, 10, 1)), 80),
        ResidentBox("b", Box((0,), (24,)), 90),
    ]
    plan = CertificatePlan(boxes, SHAPES, {"b": 3})
    assert (plan.parameters, plan.counted) == (("w", "b", "emb"), (90, 72, 0))


def test_padding_is_ignored_and_absent_parameters_sum_to_zero():
    region = torch.ones(100)
    boxes = [ResidentBox("b", Box((0,), (24,)), 50)]
    before = certificate(region, boxes, SHAPES, "master")
    region[:50] = 7.0
    region[74:] = float("nan")
    assert (certificate(region, boxes, SHAPES, "master") == before).all()
    assert [int(value) == 0 for value in before] == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
def test_every_width_of_element_is_hashed_by_its_bits(dtype):
    region = torch.arange(24).to(dtype)
    before = sum_of(region, (24,))
    assert before == sum_of(region.clone(), (24,))
    region[3] += 1
    assert before != sum_of(region, (24,))


def test_sums_wrap_like_an_all_reduce_of_signed_words():
    parts = [np.array([2**64 - 1, 2**63], dtype=np.uint64), np.array([2, 2**63], dtype=np.uint64)]
    assert combine(parts).tolist() == [1, 0]
    signed = sum(torch.from_numpy(part.view(np.int64)) for part in parts)
    assert isinstance(signed, torch.Tensor)
    assert signed.numpy().view(np.uint64).tolist() == [1, 0]


def test_boxes_outside_their_parameter_or_region_are_refused():
    with pytest.raises(ValueError, match="not inside 'b'"):
        CertificatePlan([ResidentBox("b", Box((0,), (25,)), 0)], SHAPES)
    with pytest.raises(ValueError, match=r"not inside 'w' of shape \(6, 10, 4\)"):
        CertificatePlan([ResidentBox("w", Box((0, 0), (6, 10)), 0)], SHAPES)
    # The second box lies before the first one, and is shorter.
    boxes = [ResidentBox("b", Box((0,), (20,)), 12), ResidentBox("b", Box((20,), (24,)), 0)]
    plan = CertificatePlan(boxes, SHAPES)
    plan.sums(torch.zeros(32), "master")
    with pytest.raises(ValueError, match="31 elements, boxes reach 32"):
        plan.sums(torch.zeros(31), "master")
    with pytest.raises(ValueError, match="flat and contiguous"):
        plan.sums(torch.zeros(64)[::2], "master")


def certificate(
    region: torch.Tensor, boxes: Iterable[ResidentBox], shapes: Mapping[str, tuple[int, ...]], kind: str
) -> np.ndarray:
    return CertificatePlan(boxes, shapes).sums(region, kind)


def combine(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Sum of the parts of several ranks, modulo 2^64. What an all-reduce of the int64 view computes too."""
    with np.errstate(over="ignore"):
        return np.add.reduce(np.stack(list(parts)), axis=0, dtype=np.uint64)


def random_bits(numel: int, seed: int) -> torch.Tensor:
    values = np.random.default_rng(seed).integers(0, 2**32, numel, dtype=np.uint32)
    return torch.from_numpy(values.view(np.int32))


def sum_of(whole: torch.Tensor, shape: tuple[int, ...]) -> np.uint64:
    box = ResidentBox("w", Box((0,) * len(shape), shape), 0)
    return certificate(whole, [box], {"w": shape}, "master")[0]


def slow_sum(whole: torch.Tensor) -> int:
    """The definition, one Python integer at a time."""
    key = int.from_bytes(blake2b(b"master\0w", digest_size=8).digest(), "little")
    mask, total = 2**64 - 1, 0
    for at, value in enumerate(whole.tolist()):
        mixed = (value & 0xFFFFFFFF) ^ ((key + at * WEYL) & mask)
        mixed = mixed * 0xBF58476D1CE4E5B9 & mask
        mixed ^= mixed >> 32
        mixed = mixed * 0x94D049BB133111EB & mask
        total += mixed ^ (mixed >> 29)
    return total & mask


@st.composite
def cuts(draw, shape: tuple[int, ...]) -> list[Box]:
    """A random partition of a parameter into boxes by repeated halving."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        if box.stop[dim] - box.start[dim] < 2:
            boxes.append(box)
            continue
        at = draw(st.integers(box.start[dim] + 1, box.stop[dim] - 1))
        boxes.append(Box(box.start, (*box.stop[:dim], at, *box.stop[dim + 1 :])))
        boxes.append(Box((*box.start[:dim], at, *box.start[dim + 1 :]), box.stop))
    return boxes


def laid_out(
    whole: torch.Tensor, shape: tuple[int, ...], boxes: list[Box], padding: int
) -> tuple[torch.Tensor, list[ResidentBox]]:
    """A region with these boxes one after another, each followed by `padding` elements of noise."""
    parts, resident, offset = [], [], 0
    for box in boxes:
        index = tuple(slice(start, stop) for start, stop in zip(box.start, box.stop, strict=True))
        part = whole.view(shape)[index].reshape(-1)
        resident.append(ResidentBox("w", box, offset))
        parts += [part, torch.full((padding,), -1, dtype=whole.dtype)]
        offset += len(part) + padding
    return torch.cat(parts) if parts else whole[:0], resident


def test_in_the_sum_over_steps_no_difference_of_one_step_goes_unseen_and_the_order_counts():
    for step in range(1, 200):
        for bit in (0, 1, 63):
            assert chained_sums({step: 1 << bit}) != chained_sums({step: 0}), f"bit {bit} of step {step}"
    assert chained_sums({1: 5, 2: 9}) != chained_sums({1: 9, 2: 5})
    assert 0 <= chained_sums({7: MASK, 8: MASK}) <= MASK


@given(st.dictionaries(st.integers(1, 9), st.tuples(st.integers(0, MASK), st.integers(0, MASK)), max_size=6))
def test_the_sums_over_steps_of_two_ranks_add_up_to_that_of_both(parts: dict[int, tuple[int, int]]):
    one, other = ({step: both[rank] for step, both in parts.items()} for rank in (0, 1))
    whole = {step: sum(both) & MASK for step, both in parts.items()}
    assert (chained_sums(one) + chained_sums(other)) & MASK == chained_sums(whole)
