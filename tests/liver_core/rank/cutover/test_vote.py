"""What the ranks of a next world learn from their one collective, with a sum in memory in its place."""

from collections.abc import Sequence

import pytest
import torch

from liver_core.handoff.cutover import Level
from liver_core.rank.cutover.vote import Counted, count

SENT = (torch.tensor([2**62, 7]), torch.tensor([5]))
STATE, GRADIENTS = ("a/param", "b/param"), ("a/grad",)


def voted(ranks: Sequence[tuple], sent: tuple = SENT) -> list[Counted]:
    """Each of `ranks` is (held, state, gradients); the first says what was sent."""
    brought: list[torch.Tensor] = []

    def bring(index: int) -> Counted:
        held, state, gradients = ranks[index]
        arrived = (torch.tensor(state), torch.tensor(gradients))
        return count(held, arrived, sent if index == 0 else (None, None), len(ranks), reduce)

    def reduce(whole: torch.Tensor) -> None:
        if len(brought) < len(ranks):
            brought.append(whole.clone())
        else:
            whole.copy_(torch.stack(brought).sum(0))

    for index in range(len(ranks)):
        bring(index)
    return [bring(index) for index in range(len(ranks))]


def test_parts_that_make_up_what_was_sent_leave_nothing_though_sums_wrap():
    ranks = [(Level.EVERYTHING, [2**63 - 1, 3], [9]), (Level.EVERYTHING, [2**62 - 2**63 + 1, 4], [-4])]
    for counted in voted(ranks):
        assert counted.everything and not counted.unknown
        assert counted.differing(STATE, GRADIENTS) == []


@pytest.mark.parametrize(
    ("state", "gradients", "named"), [([0, 1], [0], ["b/param"]), ([0, 0], [1], ["a/grad"]), ([0, 0], [0], [])]
)
def test_what_differs_is_named_on_every_rank(state: list[int], gradients: list[int], named: list[str]):
    ranks = [(Level.EVERYTHING, [2**62, 7], [5]), (Level.EVERYTHING, state, gradients)]
    assert [counted.differing(STATE, GRADIENTS) for counted in voted(ranks)] == [named, named]


def test_gradients_that_one_rank_misses_are_not_compared_and_the_state_is():
    ranks = [(Level.EVERYTHING, [2**62, 6], [5]), (Level.STATE, [0, 1], [77])]
    for counted in voted(ranks):
        assert not counted.everything and not counted.unknown
        assert counted.differing(STATE, GRADIENTS) == []


def test_a_rank_that_holds_nothing_is_counted_and_its_memory_is_not():
    for counted in voted([(Level.EVERYTHING, [2**62, 7], [5]), (Level.NOTHING, [123, 123], [123])]):
        assert counted.unknown == "only 1 of 2 targets hold the state"


@pytest.mark.parametrize("known", [(SENT[0], None), (None, SENT[1]), (None, None)])
def test_what_nobody_can_say_was_sent_is_not_taken_for_equal(known: tuple):
    for counted in voted([(Level.EVERYTHING, [2**62, 7], [5]), (Level.EVERYTHING, [0, 0], [0])], known):
        assert counted.unknown == "the source world's certificate is unknown"


def test_only_the_state_need_be_known_where_a_rank_misses_the_gradients():
    for counted in voted([(Level.EVERYTHING, [2**62, 7], [5]), (Level.STATE, [0, 0], [0])], (SENT[0], None)):
        assert not counted.unknown and counted.differing(STATE, GRADIENTS) == []
