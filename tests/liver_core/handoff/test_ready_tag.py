"""The boundary word: all or nobody. Pure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_core.handoff import (
    Agreement,
    BoundaryPhase,
    HandoffId,
    agreed,
    boundary_pair,
    connect_word,
    drop_word,
    pack,
    ready_tag,
)
from liver_core.handoff.ready_tag import NOTHING_WANTED, TAG_MAX

words = st.one_of(
    st.just(NOTHING_WANTED),
    st.builds(pack, st.integers(1, TAG_MAX), st.sampled_from([phase for phase in BoundaryPhase if phase])),
)


def reduce_min(all_words: list[int]) -> Agreement | None:
    """What an all-reduce with MIN over the pairs gives."""
    pairs = [boundary_pair(word) for word in all_words]
    return agreed(min(first for first, _ in pairs), -min(second for _, second in pairs))


@given(words, st.integers(1, 8))
def test_ranks_that_say_the_same_agree_on_it(word: int, ranks: int):
    agreement = reduce_min([word] * ranks)
    assert (agreement is None) == (word == NOTHING_WANTED)
    if agreement is not None:
        assert pack(agreement.tag, agreement.phase) == word


@given(st.lists(words, min_size=2, max_size=8).filter(lambda all_words: len(set(all_words)) > 1))
def test_ranks_that_say_different_things_agree_on_nothing(all_words: list[int]):
    assert reduce_min(all_words) is None


@given(words)
def test_a_word_and_its_negative_fit_a_signed_64_bit_integer(word: int):
    assert all(-(2**63) <= value < 2**63 for value in boundary_pair(word))


def test_the_tag_depends_on_handoff_and_revision_only():
    assert ready_tag(HandoffId("h"), 1) == ready_tag(HandoffId("h"), 1)
    assert len({ready_tag(HandoffId(name), revision) for name in ("h", "i") for revision in (1, 2)}) == 4
    assert 1 <= ready_tag(HandoffId("h"), 1) <= TAG_MAX


def test_a_tag_out_of_range_is_refused():
    with pytest.raises(ValueError, match="tag: must be in"):
        pack(TAG_MAX + 1, BoundaryPhase.READY)


def test_between_two_parts_of_a_step_only_the_wish_to_cut_over_is_shown_and_never_taken_for_that_of_a_boundary():
    ready = pack(7, BoundaryPhase.READY)
    assert drop_word(ready) == pack(7, BoundaryPhase.DROP)
    assert connect_word(ready) == pack(7, BoundaryPhase.CONNECT)
    assert reduce_min([drop_word(ready), ready]) is None
    for phase in (BoundaryPhase.NONE, BoundaryPhase.CHECKPOINT, BoundaryPhase.STOP):
        assert drop_word(pack(7, phase)) == NOTHING_WANTED
    assert drop_word(NOTHING_WANTED) == NOTHING_WANTED
