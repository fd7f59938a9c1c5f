"""The barrier of the next world over real groups: all targets learn the least that any of them has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from liver_core.handoff import Cutover, CutoverDeadlines, Decision
from liver_core.handoff.cutover import (
    BoundaryAgreed,
    CertificateCompared,
    EnterBarrier,
    Level,
    ProposeDecision,
    StateRead,
)
from tests.cluster.real_ranks import run_ranks

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

EVERYTHING, STATE, NOTHING = Level.EVERYTHING, Level.STATE, Level.NOTHING


@pytest.mark.parametrize(
    ("levels", "wish"),
    [
        ((EVERYTHING, STATE), Decision.GO_REDO),
        ((STATE, EVERYTHING), Decision.GO_REDO),
        ((EVERYTHING, EVERYTHING), Decision.GO),
        ((NOTHING, EVERYTHING), Decision.NO_GO),
    ],
)
def test_every_target_wishes_for_what_the_least_of_them_allows(levels: tuple[Level, Level], wish: Decision):
    assert run_ranks(_vote, 2, levels) == [wish, wish]


def _vote(rank: int, port: int, levels: tuple[Level, ...]) -> Decision:
    """One target that has read so much, from its read to its wish."""
    from datetime import timedelta
    from time import monotonic

    from torch.distributed import TCPStore

    from liver_core.rank.cutover.cutover_run import CutoverRun
    from liver_core.worlds.groups import make_group

    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    ranks = range(len(levels))
    group = make_group(store, ranks, rank, name="everyone", host="127.0.0.1", timeout_s=30, collective_s=30)
    following: Any = SimpleNamespace(
        request=SimpleNamespace(source=object(), handoff_id="h"),
        world=SimpleNamespace(voting=group),
        source_rank=None,
        target_rank=rank,
        boundary={},
    )
    machine = Cutover(
        rank=rank,
        in_source=False,
        in_target=True,
        deadlines=CutoverDeadlines(),
        boundary=BoundaryAgreed(5),
        now=monotonic(),
    )
    run = CutoverRun(following, None, machine, boundary_of=dict)
    run._joined = True  # It has compared what it has with the others.
    effects = machine.handle(StateRead(levels[rank], source_lost=levels[rank] is STATE), monotonic())
    if levels[rank] is not NOTHING:
        effects = machine.handle(CertificateCompared(equal=True), monotonic())
    (barrier,) = effects
    assert barrier == EnterBarrier(levels[rank], until=machine.next_deadline)
    (proposal,) = machine.handle(run._carry_out(barrier), monotonic())
    assert isinstance(proposal, ProposeDecision)
    return proposal.wish
