"""What waits in NCCL for a rank that is gone comes back: a collective by an abort, the making of communicators by an
abort or at its limit. The library here does what NCCL does as far as we have read it; nothing of it runs."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.real
NEVER_S = 30.0


class Library:
    """`makes`: what making the communicator of some ranks does. An abort takes `abort_s`."""

    def __init__(self, makes: Any = lambda ranks: None, abort_s: float = 0.0) -> None:
        self.makes = makes
        self.abort_s = abort_s
        self.made: list[tuple[int, ...]] = []
        self.aborted: list[tuple[int, ...]] = []
        self.all_aborted = threading.Event()

    def options(self) -> Any:
        return SimpleNamespace(config=SimpleNamespace(split_share=None, blocking=None))

    def backend(self, store: Any, rank: int, size: int, options: Any) -> Any:
        ranks = tuple(options.global_ranks_in_group)

        def make(device: Any) -> None:
            self.makes(ranks)
            self.made.append(ranks)

        def abort() -> None:
            threading.Event().wait(self.abort_s)  # As long as NCCL takes.
            self.aborted.append(ranks)
            if ranks == (0, 1, 2, 3):
                self.all_aborted.set()

        return SimpleNamespace(eager_connect_single_device=make, perform_nocolor_split=make, abort=abort)


def groups_of(library: Library) -> Any:
    """Rank 0 of TP2xDP2."""
    import torch

    from liver_core.worlds.group_plan import DeviceBackend, plan_groups
    from liver_core.worlds.nccl_groups import NcclGroups, TrainsOn

    plan = plan_groups([(0, 1), (2, 3), (0, 2), (1, 3)], 4, DeviceBackend.NCCL)
    place = TrainsOn("GPU-0", torch.device("cpu"), library)
    made, store = NcclGroups(plan, 0, place, timeout_s=20.0), SimpleNamespace()
    for ranks in plan.groups:
        if 0 in ranks:
            made.make(store, ranks, str(ranks))  # type: ignore[arg-type]
    return made


def test_making_communicators_ends_at_its_limit_counted_from_where_the_rank_began_and_the_reason_names_it() -> None:
    from liver_core.worlds.nccl_groups import CommunicatorsEnded

    comes_back = threading.Event()
    library = Library(lambda ranks: comes_back.wait(NEVER_S))
    began = time.monotonic()
    with pytest.raises(CommunicatorsEnded, match=r"limit of 0\.9 s after this rank began .*connect_s"):
        groups_of(library).connect(0.9, since=began - 0.5)
    assert 0.3 < time.monotonic() - began < 0.85, "not counted from there"
    assert library.all_aborted.wait(5.0), "what was made is not freed"
    library.aborted.clear()
    library.all_aborted.clear()
    comes_back.set()
    assert library.all_aborted.wait(5.0), "a communicator that came late is kept"
    assert library.made == [(0, 1, 2, 3)], "others were split from one that nobody wants any more"


def test_making_communicators_ends_when_a_rank_is_known_dead_without_waiting_for_the_limit() -> None:
    from liver_core.worlds.nccl_groups import CommunicatorsEnded

    begun = threading.Event()

    def makes(ranks: Any) -> None:
        begun.set()
        threading.Event().wait(5.0)

    groups = groups_of(Library(makes, abort_s=3.0))
    later = threading.Thread(target=lambda: (begun.wait(5.0), groups.abandon("rank 3 on c is dead")), daemon=True)
    later.start()
    began = time.monotonic()
    with pytest.raises(CommunicatorsEnded, match="rank 3 on c is dead"):
        groups.connect(NEVER_S, since=began)
    assert time.monotonic() - began < 1.0
    with pytest.raises(CommunicatorsEnded, match="before they were made: rank 3 on c is dead"):
        groups.connect(NEVER_S, since=began)


def test_whoever_hears_of_a_dead_rank_does_not_wait_for_the_abort_and_who_frees_the_world_does() -> None:
    library = Library(abort_s=0.3)
    groups = groups_of(library)
    groups.connect(NEVER_S, since=time.monotonic())
    began = time.monotonic()
    groups.abandon("rank 3 on c is dead")
    assert time.monotonic() - began < 0.2, "the thread that takes commands waits for NCCL"
    groups.abort()
    assert library.aborted == [(0, 2), (0, 1), (0, 1, 2, 3)], "the world's, whose resources the others use, goes last"


def test_a_communicator_that_cannot_be_aborted_keeps_no_other_from_its_abort() -> None:
    library = Library()
    groups = groups_of(library)
    groups.connect(NEVER_S, since=time.monotonic())

    def fails() -> None:
        raise RuntimeError("NCCL has no such communicator")

    groups._backends[(0, 2)].abort = fails
    groups.abort()
    assert library.aborted == [(0, 1), (0, 1, 2, 3)]


def test_an_error_of_nccl_while_they_are_made_is_raised_as_it_is() -> None:
    def makes(ranks: Any) -> None:
        raise RuntimeError("no memory for a communicator")

    with pytest.raises(RuntimeError, match="no memory for a communicator"):
        groups_of(Library(makes)).connect(NEVER_S, since=time.monotonic())
