"""The source's ring: what its counters promise holds at every moment, for readers that nobody waits for."""

from __future__ import annotations

import contextlib
import platform
import threading
import time

import pytest
import torch

from liver_core.certificate import MASK, CertificatePlan
from liver_core.device.region import AnyRegion, Region
from liver_core.layout import Box, ResidentBox
from liver_core.streaming import ring as ring_module
from liver_core.streaming.counters import CounterOrder, HostCounters
from liver_core.streaming.header import HEADER_BYTES, StepHeader
from liver_core.streaming.ring import COUNTER, HEADERS, NEVER, SLOTS, SourceRing, ring_kind, slot_of

CPU = torch.device("cpu")
ELEMENTS = 30_000


def header(version: int) -> StepHeader:
    return StepHeader(version, float(version), 1.0, (), {}, True)


def ring(elements: int = 5, depth: int = 2, version: int = 3) -> SourceRing:
    return SourceRing(torch.zeros(elements), depth, version=version)


def test_a_published_step_lies_in_its_slot_with_header_and_counter():
    made = ring()
    small = made.small
    assert (int(small[COUNTER][0]), small[SLOTS].tolist()) == (6, [NEVER, NEVER])
    gradients = torch.arange(5.0)
    made.publish(gradients, header(4))
    gradients.zero_()
    assert (int(small[COUNTER][0]), small[SLOTS].tolist()) == (6, [8, NEVER])
    assert made.slots[ring_kind(0)].tensors[0].tolist() == [0, 1, 2, 3, 4], "the slot has a copy of its own"
    assert StepHeader.decode(small[HEADERS][:HEADER_BYTES].numpy().tobytes()) == header(4)
    made.stepping(3)
    assert int(small[COUNTER][0]) == 7
    made.stepped(4)
    assert int(small[COUNTER][0]) == 8
    made.publish(gradients, header(5))
    assert small[SLOTS].tolist() == [8, 10]


def test_only_the_next_version_is_published_and_stepped_to_and_only_whole_gradients():
    made = ring(version=3)
    for version in (2, 3, 5):
        with pytest.raises(ValueError, match=f"header of version {version}, expected 4"):
            made.publish(torch.ones(5), header(version))
        with pytest.raises(ValueError, match=f"stepped to version {version} from 3"):
            made.stepped(version)
    for version in (2, 4):
        with pytest.raises(ValueError, match=f"steps from version {version}, but stands at 3"):
            made.stepping(version)
    for parts in ((torch.ones(4),), (torch.ones(6),), (torch.ones(4), torch.ones(2))):
        total = sum(part.numel() for part in parts)
        with pytest.raises(ValueError, match=f"gradients have {total} elements, the ring has 5"):
            made.publish(Region(parts), header(4))
    assert (int(made.small[COUNTER][0]), made.small[SLOTS].tolist()) == (6, [NEVER, NEVER]), "nothing is begun"


def test_a_slot_has_the_elements_and_dtypes_of_the_gradients_in_memory_of_its_own():
    gradients = Region([torch.arange(3.0), torch.arange(3.0, 5.0), torch.arange(4.0).bfloat16()])
    made = SourceRing(gradients, 2, version=3)
    made.publish(gradients, header(4))
    slot = made.slots[ring_kind(0)]
    assert [(tensor.dtype, tensor.tolist()) for tensor in slot.tensors] == [
        (torch.float32, [0, 1, 2, 3, 4]),
        (torch.bfloat16, [0, 1, 2, 3]),
    ]


def test_all_memory_is_in_the_regions_and_the_regions_keep_their_place():
    made = ring()
    places = {kind: region.tensors[0].data_ptr() for kind, region in made.regions.items()}
    for version in range(4, 9):
        made.publish(torch.ones(5), header(version))
        made.stepping(version - 1)
        made.stepped(version)
    assert {kind: region.tensors[0].data_ptr() for kind, region in made.regions.items()} == places
    assert made.bytes == 8 + 2 * (8 + HEADER_BYTES + 5 * 4)


def test_a_slot_is_invalid_before_anything_of_it_changes_and_valid_only_after_all_of_it(monkeypatch):
    made = ring(depth=1)
    made.publish(torch.ones(5), header(4))
    made.stepping(3)
    made.stepped(4)
    slots, seen = made.small[SLOTS], []
    original = torch.Tensor.copy_

    def copy(self: torch.Tensor, *rest, **more) -> torch.Tensor:
        seen.append(int(slots[0]))
        return original(self, *rest, **more)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    made.publish(torch.ones(5), header(5))
    monkeypatch.undo()
    assert seen == [9], "gradients are written under the odd counter of their version"
    assert int(slots[0]) == 10


def test_a_reader_that_nobody_waits_for_believes_nothing_mixed():
    made = ring(ELEMENTS, depth=2, version=0)
    small, over, wrong, believed = made.small, threading.Event(), [], []

    def read() -> None:
        while not over.is_set():
            for slot in range(2):
                before = int(small[SLOTS][slot])
                gradients, data = made.slots[ring_kind(slot)].tensors[0].clone(), small[HEADERS].clone()
                if before < 0 or before % 2 or int(small[SLOTS][slot]) != before:
                    continue
                found = StepHeader.decode(data[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES].numpy().tobytes())
                believed.append(before // 2)
                if found.version != before // 2 or not bool((gradients == float(found.version)).all()):
                    wrong.append(before)

    reader = threading.Thread(target=read)
    reader.start()
    deadline, version = time.monotonic() + 20, 0
    while (len(set(believed)) < 60 or version < 300) and time.monotonic() < deadline:
        version += 1
        made.publish(torch.full((ELEMENTS,), float(version)), header(version))
        made.stepping(version - 1)
        made.stepped(version)
    over.set()
    reader.join(10)
    assert not reader.is_alive()
    assert not wrong
    assert len(set(believed)) >= 60


def test_who_settles_is_told_whether_anything_was_due():
    made = ring()
    assert not made.is_due and made.settle_next() is False


def test_two_threads_that_waited_for_the_same_event_write_one_counter_once(monkeypatch):
    made = ring(depth=2)
    both_have_waited, both_write = threading.Barrier(2), threading.Barrier(2)
    put, failures = HostCounters.put, []

    def await_event(*_: object) -> None:
        both_have_waited.wait(10)

    def slow_put(counters: HostCounters, at: int, value: int) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both_write.wait(0.2)  # The other thread comes here too, unless it is kept out.
        put(counters, at, value)

    def settle() -> None:
        try:
            made.settle_next()
        except CounterOrder as error:
            failures.append(error)

    monkeypatch.setattr(ring_module, "is_host", lambda device: False)
    made.publish(torch.ones(5), header(4))
    made.stepping(3)
    made.stepped(4)
    assert (made.small[SLOTS].tolist(), int(made.small[COUNTER][0])) == ([7, NEVER], 7), "two counters are due"
    monkeypatch.setattr(ring_module, "await_event", await_event)
    monkeypatch.setattr(HostCounters, "put", slow_put)
    threads = [threading.Thread(target=settle) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    monkeypatch.undo()
    assert not failures
    assert (made.small[SLOTS].tolist(), int(made.small[COUNTER][0])) == ([8, NEVER], 7)
    assert made.settle_next() and int(made.small[COUNTER][0]) == 8 and not made.is_due


@pytest.mark.parametrize("path", [(5,), (8,), (7, 9), (7, 8, 7), (7, 8, 8)], ids=str)
def test_a_counter_never_goes_back_and_hides_no_change(path: tuple[int, ...]):
    """Who writes an odd number has written the even one before, so two equal looks have nothing between them."""
    counters = HostCounters(1, 6)
    with pytest.raises(CounterOrder, match=f"to {path[-1]}"):
        for value in path:
            counters.put(0, value)
    assert counters[0] == ([6, *path])[-2], "what is refused is not written"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda made: made.publish(torch.ones(5), header(5)), "version 5"),
        (lambda made: made.publish(torch.ones(6), header(4)), "6 elements"),
        (lambda made: made.stepping(4), "stands at 3"),
        (lambda made: made.stepped(5), "from 3"),
        (lambda made: ring(depth=0), "depth"),
    ],
)
def test_calls_out_of_order_are_refused_before_anything_is_written(call, text: str):
    made = ring()
    with pytest.raises(ValueError, match=text):
        call(made)
    assert (int(made.small[COUNTER][0]), made.small[SLOTS].tolist()) == (6, [NEVER, NEVER])


def test_host_memory_whose_stores_may_be_reordered_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(RuntimeError, match="aarch64"):
        ring()


def test_the_sum_of_a_slot_is_the_hash_of_its_gradient_and_none_once_it_is_overwritten():
    plan = CertificatePlan([ResidentBox("w", Box((0,), (5,)), 0)], {"w": (5,)})
    made, gradients = ring(depth=2), torch.randn(5)
    made.publish(gradients, header(4))
    assert made.slot_sum(4, plan) == int(plan.sums(gradients, "grad").sum()) & MASK
    assert made.slot_sum(2, plan) is None and made.slot_sum(5, plan) is None and made.slot_sum(6, plan) is None
    original = plan.sums

    def overwritten_meanwhile(memory: AnyRegion, kind: str):
        sums = original(memory, kind)
        made.small[SLOTS][slot_of(4, 2)] = 11
        return sums

    plan.sums = overwritten_meanwhile
    assert made.slot_sum(4, plan) is None
