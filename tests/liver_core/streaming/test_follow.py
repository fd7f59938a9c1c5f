"""The follower: what is resident is true at its version, whatever the sources do meanwhile. Pure.

The invariants are searched for by `tests.simulation.streaming`; here are its short run and single decisions.
"""

from dataclasses import replace
from math import inf

import pytest

from liver_core.reshard import CopyRuns
from liver_core.streaming.follow import (
    Begin,
    Converged,
    Done,
    Follower,
    FollowLimits,
    GiveUp,
    GradientsRead,
    Hash,
    Hashed,
    HashMissed,
    Look,
    Looked,
    ReadGradients,
    ReadTiles,
    Replay,
    Replayed,
    Sleep,
    TileRead,
    TilesRead,
)
from liver_core.streaming.header import StepHeader
from liver_core.streaming.pace import BUSY_S_MOST, IDLE_S_MOST
from liver_core.streaming.tiles import Tile
from liver_core.streaming.tiles import TilePart as Part
from tests.simulation.streaming import BUGS, run_seeds

SEEDS = 1500
SEEDS_TO_FIND_A_BUG = 1500


@pytest.fixture(scope="module")
def short_run():
    return run_seeds(0, SEEDS)


def test_no_interleaving_makes_a_resident_word_untrue(short_run):
    assert short_run.failures == []


def test_the_short_run_meets_losses_torn_reads_hashes_and_every_ending(short_run):
    assert min(short_run.losses, short_run.torn, short_run.hashes, short_run.replays) > 100
    assert short_run.outcomes["done"] > SEEDS / 2
    assert len(short_run.outcomes) >= 4


@pytest.mark.parametrize("bug", BUGS)
def test_every_planted_bug_is_found(bug: str):
    first = BUGS[bug].first_seed
    assert any(run_seeds(seed, 1, bug).failures for seed in range(first, first + SEEDS_TO_FIND_A_BUG)), bug


def tiles(count: int, peers: tuple[int, ...] = (0,)) -> list[Tile]:
    size = 10 * len(peers)
    return [
        Tile(
            at * size,
            (at + 1) * size,
            ((at * size, (at + 1) * size),),
            tuple(Part(peer, (CopyRuns(0, at * size + 10 * index, 10),)) for index, peer in enumerate(peers)),
            inf,
        )
        for at in range(count)
    ]


def read(size: int, seconds: float, held: bool | None = None) -> TilesRead:
    return TilesRead((TileRead(size, held),), seconds)


def header(version: int) -> StepHeader:
    return StepHeader(version, 1.0, 1.0, (), {}, True, 0.1)


def follower(count: int = 1, peers: tuple[int, ...] = (0,), **limits: int) -> Follower:
    return Follower(tiles(count, peers), depth=2, limits=FollowLimits(**limits))


def copied_at(version: int, count: int = 1, **limits: int) -> Follower:
    """A follower that has everything at `version` and has just found no further step."""
    machine = Follower(tiles(count), depth=2, limits=FollowLimits(**limits))
    machine.handle(Begin())
    for _ in range(count):
        assert isinstance(machine.handle(Looked((2 * version,), (-1,)))[-1], ReadTiles)
        assert machine.handle(read(120, 0.01)) == (Look(version + 1, (0,)),)
    effects = machine.handle(Looked((2 * version,), (-1,)))
    assert effects[:-1] == (Converged(version),) and isinstance(effects[-1], Sleep)
    return machine


def test_tiles_are_copied_at_one_version_and_one_look_serves_two_tiles():
    machine = copied_at(4, count=3)
    assert machine.counts.read_bytes == 360 and machine.counts.torn == 0


def test_a_tile_is_torn_when_its_source_stepped_meanwhile_and_is_read_again():
    machine = follower()
    machine.handle(Begin())
    assert machine.handle(Looked((8,), (-1,))) == (ReadTiles((0,), 4),)
    machine.handle(read(120, 0.01))
    assert isinstance(machine.handle(Looked((9,), (10,)))[-1], Sleep)
    machine.handle(Begin())
    assert machine.handle(Looked((10,), (10,))) == (ReadTiles((0,), 5),)
    machine.handle(read(120, 0.01))
    machine.handle(Looked((10,), (10,)))
    assert (machine.counts.torn, machine.counts.read_bytes, machine.counts.reread_bytes) == (1, 120, 120)


def test_a_tile_whose_sources_are_not_at_one_version_waits():
    machine = follower(peers=(0, 1))
    machine.handle(Begin())
    assert isinstance(machine.handle(Looked((8, 10), (-1, -1)))[-1], Sleep)
    machine.handle(Begin())
    assert machine.handle(Looked((10, 10), (-1, -1))) == (ReadTiles((0,), 5),)


def test_a_step_is_replayed_before_the_next_tile_is_copied():
    machine = follower(count=2)
    machine.handle(Begin())
    machine.handle(Looked((8,), (-1,)))
    machine.handle(read(120, 0.01))
    assert machine.handle(Looked((8,), (10,))) == (ReadGradients(5, (0,), (0,)),)
    machine.handle(GradientsRead(header(5), "", 40, 0.01))
    assert machine.handle(Looked((10,), (10,))) == (Replay(header(5), (0,)),)
    machine.handle(Replayed(0.01))
    assert machine.version == 5
    assert machine.handle(Looked((10,), (-1,))) == (ReadTiles((1,), 5),)


def test_gradients_overwritten_while_they_were_read_are_not_replayed():
    machine = copied_at(4)
    machine.handle(Begin())
    assert isinstance(machine.handle(Looked((10,), (10,)))[-1], ReadGradients)
    machine.handle(GradientsRead(header(5), "", 40, 0.01))
    assert machine.handle(Looked((13,), (13,))) == (Look(5, (0,)),)
    assert (machine.resident, machine.counts.losses, machine.counts.replays) == ((), 1, 0)


def test_a_step_that_was_never_published_is_lost_too():
    machine = copied_at(4)
    machine.handle(Begin())
    assert isinstance(machine.handle(Looked((10,), (-1,)))[-1], Sleep), "the slot may be older than the counter"
    machine.handle(Begin())
    machine.handle(Looked((10,), (-1,)))
    assert machine.counts.losses == 1


def test_a_slot_that_is_being_written_is_not_lost_however_long_that_takes():
    machine = copied_at(4)
    for _ in range(3):
        machine.handle(Begin())
        assert isinstance(machine.handle(Looked((9,), (9,)))[-1], Sleep)
    machine.handle(Begin())
    assert isinstance(machine.handle(Looked((9,), (10,)))[-1], ReadGradients)
    assert machine.counts.losses == 0


def test_a_source_that_is_in_its_step_and_whose_slot_is_older_never_published_it():
    machine = copied_at(4)
    for counter, losses in ((8, 0), (9, 0), (9, 1)):
        machine.handle(Begin())
        machine.handle(Looked((counter,), (8,)))
        assert machine.counts.losses == losses


def test_a_slot_of_a_later_version_is_lost_at_once_and_so_is_one_of_several_sources():
    machine = copied_at(4)
    machine.handle(Begin())
    machine.handle(Looked((8,), (11,)))
    assert machine.counts.losses == 1
    pair = follower(peers=(0, 1))
    pair.handle(Begin())
    pair.handle(Looked((8, 8), (-1, -1)))
    pair.handle(read(120, 0.01))
    pair.handle(Looked((8, 8), (-1, -1)))
    pair.handle(Begin())
    assert isinstance(pair.handle(Looked((8, 8), (10, 9)))[-1], Sleep), "one of two is no whole step"
    pair.handle(Begin())
    pair.handle(Looked((8, 8), (10, 12)))
    assert pair.counts.losses == 1


def test_losses_are_bounded_and_the_text_says_what_was_too_slow():
    machine = copied_at(4, losses_max=0)
    machine.handle(Begin())
    (effect,) = machine.handle(Looked((14,), (14,)))
    assert isinstance(effect, GiveUp)
    assert "does not converge, the ring of depth 2 was overtaken at version 4" in effect.reason
    assert machine.ended == effect


def test_torn_tiles_are_bounded_although_replays_go_on_between():
    machine = follower(count=2, torn_max=3)
    machine.handle(Begin())
    machine.handle(Looked((8,), (-1,)))
    machine.handle(read(120, 0.01))
    effect, version = machine.handle(Looked((8,), (-1,)))[-1], 4
    for _ in range(20):
        if isinstance(effect, GiveUp):
            break
        assert isinstance(effect, ReadTiles)
        machine.handle(read(120, 0.01))
        version += 1
        effect = machine.handle(Looked((2 * version,), (2 * version,)))[-1]
        if isinstance(effect, ReadGradients):
            machine.handle(GradientsRead(header(version), "", 40, 0.01))
            machine.handle(Looked((2 * version,), (2 * version,)))
            machine.handle(Replayed(0.0))
            effect = machine.handle(Looked((2 * version,), (-1,)))[-1]
    assert isinstance(effect, GiveUp) and "torn 4 times in a row" in effect.reason


@pytest.mark.parametrize(
    ("found", "differs", "text"),
    [
        (
            header(5),
            "sources differ on clip: 1.0 and 0.0",
            "sources differ on clip: 1.0 and 0.0, of the step to version 5",
        ),
        (header(4), "", "says it is whole and is not"),
        (None, "", "says it is whole and is not"),
    ],
)
def test_a_whole_slot_with_the_wrong_header_ends_it(found, differs, text):
    machine = copied_at(4)
    machine.handle(Begin())
    machine.handle(Looked((8,), (10,)))
    machine.handle(GradientsRead(found, differs, 40, 0.01))
    (effect,) = machine.handle(Looked((8,), (10,)))
    assert isinstance(effect, GiveUp) and text in effect.reason


def test_it_stops_at_exactly_the_version_to_finish_at():
    machine = copied_at(4)
    machine.finish(4)
    machine.handle(Begin())
    assert machine.handle(Looked((9,), (10,))) == (Done(4),)


def test_what_is_left_at_the_version_to_finish_at_is_copied_while_the_sources_stand():
    machine = follower(count=2)
    machine.finish(4)
    machine.handle(Begin())
    assert machine.handle(Looked((8,), (10,))) == (ReadTiles((0,), 4),)
    machine.handle(read(120, 0.01))
    assert machine.handle(Looked((8,), (10,))) == (ReadTiles((1,), 4),), "the next step is not touched"
    machine.handle(read(120, 0.01))
    assert machine.handle(Looked((8,), (10,))) == (Done(4),)


def test_sources_that_go_on_before_all_is_copied_end_it():
    machine = follower(count=2)
    machine.finish(4)
    machine.handle(Begin())
    machine.handle(Looked((8,), (10,)))
    machine.handle(read(120, 0.01))
    machine.handle(Looked((8,), (10,)))
    machine.handle(read(120, 0.01))
    (effect,) = machine.handle(Looked((9,), (10,)))
    assert isinstance(effect, GiveUp) and "went beyond version 4" in effect.reason


def test_one_source_of_two_that_goes_on_before_all_is_copied_ends_it():
    machine = follower(count=2, peers=(0, 1))
    machine.finish(4)
    machine.handle(Begin())
    machine.handle(Looked((8, 8), (-1, -1)))
    machine.handle(read(120, 0.01))
    assert machine.handle(Looked((8, 8), (-1, -1))) == (ReadTiles((1,), 4),)
    machine.handle(read(120, 0.01))
    (effect,) = machine.handle(Looked((8, 9), (-1, -1)))
    assert isinstance(effect, GiveUp) and "went beyond version 4" in effect.reason


def test_an_announced_version_is_hashed_before_the_next_step_is_replayed():
    machine = copied_at(4)
    machine.announce(4)
    machine.handle(Begin())
    assert machine.handle(Looked((10,), (10,))) == (Hash(4),)
    machine.handle(Hashed())
    assert isinstance(machine.handle(Looked((10,), (10,)))[-1], ReadGradients)


def test_an_announcement_between_reading_and_replaying_still_counts():
    machine = copied_at(4)
    machine.handle(Begin())
    machine.handle(Looked((10,), (10,)))
    machine.announce(4)
    machine.handle(GradientsRead(header(5), "", 40, 0.01))
    assert machine.handle(Looked((10,), (10,))) == (Hash(4),)


def test_a_version_that_is_past_cannot_be_hashed_and_is_reported():
    machine = copied_at(4)
    machine.announce(3)
    machine.handle(Begin())
    effects = machine.handle(Looked((8,), (-1,)))
    assert isinstance(effects[0], HashMissed) and effects[0].version == 3 and "stands at 4" in effects[0].reason


def test_a_rank_without_a_share_is_at_any_version():
    machine = Follower((), depth=2)
    assert machine.handle(Begin())[0] == Converged(0)
    assert [type(effect) for effect in machine.handle(Begin())] == [Sleep]
    machine.announce(7)
    assert machine.handle(Begin()) == (Hash(7),)
    machine.finish(9)
    assert machine.handle(Hashed()) == (Done(9),)


def test_it_knows_how_far_behind_it_is_and_how_much_is_left():
    machine = follower(count=3)
    assert (machine.lag, machine.todo_elements) == (None, 30)
    machine.handle(Begin())
    machine.handle(Looked((8,), (-1,)))
    assert machine.lag is None, "nothing is here yet"
    machine.handle(read(120, 0.01))
    machine.handle(Looked((8,), (-1,)))
    assert (machine.lag, machine.todo_elements) == (0, 20)
    machine = copied_at(4)
    machine.handle(Begin())
    machine.handle(Looked((13,), (10,)))
    assert (machine.lag, machine.todo_elements) == (2, 0)


def test_tiles_are_asked_for_ahead_where_who_reads_them_looks_at_the_counter():
    machine = Follower(tiles(5), depth=2, guarded=frozenset({0}), limits=FollowLimits(batch_s=3.0))
    machine.handle(Begin())
    assert machine.handle(Looked((8,), (-1,))) == (ReadTiles((0,), 4),), "how long one takes is not known"
    machine.handle(read(120, 1.0, held=True))
    assert machine.handle(Looked((9,), (10,))) == (ReadGradients(5, (0,), (0,)),), "believed although it steps now"
    machine.handle(GradientsRead(header(5), "", 40, 0.01))
    machine.handle(Looked((10,), (10,)))
    machine.pace.step_s = 12.0
    machine.handle(Replayed(0.01))
    assert machine.handle(Looked((10,), (-1,))) == (ReadTiles((1, 2, 3), 5),)
    machine.handle(TilesRead((TileRead(120, True), TileRead(40, False), TileRead(0, False)), 2.0))
    machine.handle(Looked((12,), (12,)))
    assert machine.resident == (0, 1) and machine.todo == [4, 3, 2]
    counts = machine.counts
    assert (counts.read_bytes, counts.reread_bytes, counts.torn) == (240, 40, 1), "what was not sent is not torn"


@pytest.mark.parametrize(("step_s", "share", "count"), [(0.1, 1.0, 3), (12.0, 0.5, 3), (12.0, 1.0, 6), (0.1, 0.4, 1)])
def test_a_batch_is_no_longer_than_half_a_step_and_less_where_the_driver_rests(step_s: float, share: float, count: int):
    machine = Follower(tiles(9), depth=2, guarded=frozenset({0}), limits=FollowLimits(batch_s=0.1))
    machine.pace.copy_s, machine.pace.step_s, machine.share = 0.1 / 65, step_s, share
    machine.handle(Begin())
    (effect,) = machine.handle(Looked((8,), (-1,)))
    assert effect == ReadTiles(tuple(range(count)), 4)


def test_a_tile_of_a_peer_whose_reader_does_not_look_goes_alone():
    first, second, third, fourth = tiles(4)
    other = replace(third, reads=(replace(third.reads[0], peer=1),))
    made = Follower((first, second, other, fourth), depth=2, guarded=frozenset({0}), limits=FollowLimits(batch_s=9.0))
    made.handle(Begin())
    made.handle(Looked((8,), (-1,)))
    made.handle(read(120, 1.0, held=True))
    assert made.handle(Looked((8,), (-1,))) == (ReadTiles((1,), 4),)
    made.handle(read(120, 1.0, held=True))
    assert made.handle(Looked((8,), (-1,))) == (Look(5, (0, 1)),)
    assert made.handle(Looked((8, 8), (-1, -1))) == (ReadTiles((2,), 4),)
    made.handle(read(120, 1.0))
    assert made.handle(Looked((8, 8), (-1, -1))) == (ReadTiles((3,), 4),)


def test_what_it_took_is_counted_and_measured_for_each_element():
    machine = follower(count=2)
    machine.handle(Begin())
    machine.handle(Looked((8,), (-1,)))
    machine.handle(read(120, 0.01))
    machine.handle(Looked((10,), (10,)))
    machine.handle(read(120, 0.02))
    assert machine.handle(Looked((10,), (10,))) == (ReadTiles((1,), 5),)
    assert machine.pace.copy_s == pytest.approx(0.003), "what was torn took time too"
    machine.handle(read(110, 0.003))
    machine.handle(Looked((10,), (12,)))
    machine.handle(GradientsRead(header(6), "", 40, 0.04))
    machine.handle(Looked((12,), (12,)))
    machine.handle(Replayed(0.06))
    pace, counts = machine.pace, machine.counts
    assert pace.copy_s == pytest.approx(0.7 * 0.003 + 0.3 * 0.0003)
    assert (pace.fetch_s, pace.replay_s, pace.step_s) == (pytest.approx(0.002), pytest.approx(0.003), 0.1)
    assert (counts.read_bytes, counts.reread_bytes, counts.replayed_bytes) == (230, 120, 40)
    assert (counts.torn, counts.replays, counts.losses, machine.version) == (1, 1, 0, 6)


def test_after_a_loss_everything_is_copied_again_from_the_first_tile_on_until_there_were_too_many():
    machine = copied_at(4, count=3, losses_max=1)
    machine.handle(Begin())
    assert machine.handle(Looked((14,), (14,))) == (Look(5, (0,)),)
    assert (machine.converged, machine.resident, machine.todo_elements) == (False, (), 30)
    for tile in range(3):
        assert machine.handle(Looked((14,), (14,))) == (ReadTiles((tile,), 7),)
        machine.handle(read(120, 0.01))
    assert machine.handle(Looked((14,), (14,)))[0] == Converged(7)
    assert (machine.counts.read_bytes, machine.counts.reread_bytes) == (360, 360)
    machine.handle(Begin())
    (effect,) = machine.handle(Looked((20,), (20,)))
    assert isinstance(effect, GiveUp) and "for the 2th time" in effect.reason


@pytest.mark.parametrize(("counter", "converged"), [(8, True), (10, True), (11, True), (12, False)])
def test_it_is_converged_when_all_is_here_and_no_source_is_more_than_one_step_ahead(counter: int, converged: bool):
    first, second = tiles(2)
    other = replace(second, reads=(replace(second.reads[0], peer=1),))
    machine = Follower((first, other), depth=2)
    machine.handle(Begin())
    machine.handle(Looked((8,), (-1,)))
    machine.handle(read(120, 0.01))
    assert machine.handle(Looked((8,), (-1,))) == (Look(5, (0, 1)),), "the next tile has another source"
    assert machine.handle(Looked((8, 8), (-1, -1))) == (ReadTiles((1,), 4),)
    machine.handle(read(120, 0.01))
    effects = machine.handle(Looked((counter, 8), (10, -1)))
    assert effects[:-1] == ((Converged(4),) if converged else ()) and isinstance(effects[-1], Sleep)


def test_with_a_version_to_finish_at_it_looks_as_often_as_it_may():
    machine = follower(count=1)
    machine.finish(5)
    machine.handle(Begin())
    assert machine.handle(Looked((9,), (9,))) == (Sleep(0.001),)


def test_beside_long_steps_who_lacks_nothing_looks_less_often_than_who_still_copies():
    idle, copying = copied_at(4, count=2), follower(count=2)
    idle.pace.step_s = copying.pace.step_s = 100.0
    assert idle.handle(Looked((8,), (-1,)))[-1] == Sleep(IDLE_S_MOST)
    copying.handle(Begin())
    assert copying.handle(Looked((9,), (9,)))[-1] == Sleep(BUSY_S_MOST)


def test_a_version_that_was_passed_cannot_be_finished_at():
    machine = copied_at(4)
    machine.finish(3)
    machine.handle(Begin())
    (effect,) = machine.handle(Looked((8,), (-1,)))
    assert effect == GiveUp("stands at version 4, beyond 3")


def test_convergence_is_estimated_from_copying_replaying_and_step_time():
    machine = follower(count=4)
    assert machine.estimate() is None
    machine.pace.copied(1.0, 10)
    assert machine.estimate() == pytest.approx(4.0)
    machine.pace.step_s = 10.0
    machine.pace.replayed(2.0, 10)
    slowed = machine.estimate()
    assert slowed is not None and 4.0 < slowed < 10.0
    machine.pace.step_s = 8.0
    assert machine.estimate() == inf, "replaying everything takes as long as a step"
