"""From end to end: sources go on stepping, targets are cut otherwise, and every bit is equal at the version agreed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from math import inf

import pytest

from liver_core.reshard.plan import CopyRuns
from liver_core.streaming.reader import Following, StreamEnd
from liver_core.streaming.tiles import LOCAL, cut_tiles
from liver_core.transport.protocol import Read, ReadReport
from tests.liver_core.streaming.optimizers import OPTIMIZERS, same_bits
from tests.liver_core.streaming.scene import LIMIT_S, Scene, Sizes, in_one_process
from tests.liver_core.transport.in_memory import Fault, FaultKind
from tests.liver_core.transport.ranks import Rank, run_ranks
from tests.tiers import sample

SEEDS = 28


@pytest.mark.parametrize("seed", sample(range(SEEDS), *range(0, SEEDS, 3)))
def test_what_streams_beside_training_equals_it_bit_for_bit(seed: int):
    draw = random.Random(seed)
    sizes = Sizes(draw.choice([1, 2, 3, 8]), draw.choice([64, 300, 2000]), draw.choice([1.0, 1.0, 0.7, 0.3]))
    scene, _ = in_one_process(seed, list(OPTIMIZERS)[seed % len(OPTIMIZERS)], sizes)
    scene.run(draw.randint(3, 25), wait_for_all=seed % 4 != 3)
    expected = scene.state()
    for rank, target in scene.targets.items():
        (result,) = target.results
        assert (result.end, result.version, result.whole) == (StreamEnd.DONE, scene.version, True), result.reason
        for kind, tensor in expected[rank].items():
            assert same_bits(target.regions[kind], tensor), f"{kind} of target {rank}"
        remote_bytes = scene.job.plan(rank).remote_elements * 4 * len(expected[rank])
        assert result.counts.read_bytes == remote_bytes, "every byte once, what was read again is counted apart"
        for version, hashed in target.hashed.items():
            for kind, tensor in scene.kept[version][rank].items():
                assert same_bits(hashed[kind], tensor), f"{kind} at the announced version {version}"


def test_with_a_deep_ring_the_targets_converge_and_hash_at_the_announced_version():
    scene, _ = in_one_process(5, "adamw for-loop", Sizes(64, 2000, 1.0))
    scene.run(40, wait_for_all=True)
    for target in scene.targets.values():
        assert target.converged.is_set()
        assert list(target.hashed) == list(scene.kept) and not target.missed
        assert target.results[0].counts.replays > 0
    assert scene.targets[0].stream.status().estimate_s == 0.0


def test_a_ring_that_is_overtaken_is_copied_again_and_ends_equal():
    scene, _ = in_one_process(2, "sgd momentum", Sizes(1, 64, 0.05))
    scene.run(60, wait_for_all=False)
    assert any(target.results[0].counts.losses or target.results[0].counts.torn for target in scene.targets.values())
    for target, expected in zip(scene.targets.values(), scene.state(), strict=True):
        assert target.results[0].end is StreamEnd.DONE
        assert all(same_bits(target.regions[kind], tensor) for kind, tensor in expected.items())


def test_a_source_that_dies_ends_the_stream_and_is_named():
    scene, network = in_one_process(1, "adam", Sizes(2, 300, 1.0))
    network.inject("rank1", Fault(FaultKind.DIE))
    result = scene.targets[0].stream.run(time.monotonic() + LIMIT_S)
    assert (result.end, result.peer, result.whole) == (StreamEnd.LOST, 1, False)
    assert "rank1" in result.reason


def test_a_stream_ends_at_its_deadline_and_when_it_is_told_to():
    scene, _ = in_one_process(1, "adam", Sizes(2, 300, 1.0))
    result = scene.targets[0].stream.run(time.monotonic() + 0.5)
    assert result.end is StreamEnd.TIMED_OUT and result.whole
    scene.targets[1].stream.stop()
    result = scene.targets[1].stream.run(inf)
    assert (result.end, result.whole) == (StreamEnd.STOPPED, False)


def test_the_deadline_of_a_stream_can_be_moved_while_it_runs():
    scene, _ = in_one_process(1, "adam", Sizes(2, 300, 1.0))
    stream, results = scene.targets[0].stream, []
    nearer, later = time.monotonic() + 1.0, time.monotonic() + 1.6
    running = threading.Thread(target=lambda: results.append(stream.run(nearer)))
    running.start()
    assert scene.targets[0].converged.wait(LIMIT_S)
    stream.set_deadline(inf)
    running.join(later - time.monotonic())
    assert running.is_alive(), "it ended at the deadline that it began with"
    stream.finish(scene.version)
    running.join(LIMIT_S)
    assert results[0].end is StreamEnd.DONE

    other = scene.targets[1].stream
    running = threading.Thread(target=lambda: results.append(other.run(inf)))
    running.start()
    assert scene.targets[1].converged.wait(LIMIT_S)
    other.set_deadline(time.monotonic())
    running.join(LIMIT_S)
    assert results[1].end is StreamEnd.TIMED_OUT


def test_a_replay_that_fails_leaves_nothing_that_could_be_used():
    scene, _ = in_one_process(1, "adam", Sizes(8, 300, 1.0))
    stream = scene.targets[0].stream

    def broken(spans, header) -> None:
        raise KeyError("no such group")

    stream._replay = broken
    thread = threading.Thread(target=scene._follow, args=(scene.targets[0], time.monotonic() + LIMIT_S))
    thread.start()
    assert scene.targets[0].converged.wait(LIMIT_S)
    scene.step(scene.rings)
    thread.join(LIMIT_S)
    (result,) = scene.targets[0].results
    assert (result.end, result.whole) == (StreamEnd.FAILED, False) and "no such group" in result.reason


def test_a_share_bounds_the_part_of_the_time_that_is_worked():
    scene, _ = in_one_process(3, "adam", Sizes(2, 300, 1.0))
    stream, waited = scene.targets[0].stream, []
    stream._changed.wait = lambda timeout=None: waited.append(timeout) or False
    stream.set_share(0.25)
    stream._deadline = inf
    stream._throttle(0.1)
    assert waited == [pytest.approx(0.3)]
    scene.targets[0].stream.finish(scene.version)
    stream._throttle(0.1)
    assert len(waited) == 1, "training waits now"
    with pytest.raises(ValueError, match="share"):
        stream.set_share(0.0)


def test_tiles_of_a_peer_without_a_ring_are_refused_at_once():
    scene, _ = in_one_process(3, "adam", Sizes(2, 300, 1.0))
    tiles = cut_tiles(scene.job.plan(0), [(0, len(scene.job.owned[1][0]))], 300)
    with pytest.raises(ValueError, match=r"peers \[-1, 1\]"):
        Following(tiles, {}, scene.targets[0].regions, ("master",))
    with pytest.raises(ValueError, match="no source regions"):
        Following(tiles, {LOCAL: 2, 1: 2}, scene.targets[0].regions, ("master",))


@pytest.mark.real
@pytest.mark.parametrize("optimizer", ["adamw foreach", "sgd momentum"])
def test_two_processes_stream_over_nixl_while_both_go_on_stepping(optimizer: str):
    scenario = stream_adamw if optimizer == "adamw foreach" else stream_sgd
    for found in run_ranks("nixl", 2, scenario):
        assert found["end"] == StreamEnd.DONE and found["version"] == found["expected"], found
        assert found["different"] == [] and found["replays"] > 0


def stream_adamw(rank: Rank) -> dict:
    return stream_over(rank, "adamw foreach")


def stream_sgd(rank: Rank) -> dict:
    return stream_over(rank, "sgd momentum")


def stream_over(rank: Rank, optimizer: str) -> dict:
    def share_addresses(mine: dict[int, bytes]) -> dict[int, bytes]:
        return {at: data for at, data in enumerate(rank.exchange(mine[rank.rank])) if data}

    scene = Scene(4, optimizer, Sizes(6, 300), {rank.rank: rank.endpoint()}, share_addresses=share_addresses)
    scene.run(30, wait_for_all=True, everywhere=lambda here: all(rank.exchange(b"yes" if here else b"")))
    target = scene.targets[rank.rank]
    expected = scene.state()[rank.rank]
    different = [kind for kind, tensor in expected.items() if not same_bits(target.regions[kind], tensor)]
    (result,) = target.results
    rank.exchange()
    return {
        "end": result.end,
        "version": result.version,
        "expected": scene.version,
        "different": different,
        "replays": result.counts.replays,
        "reason": result.reason,
    }


class Paced:
    """A transport whose reads take a millisecond for each element. `patience`: seconds that each read was given."""

    def __init__(self) -> None:
        self.patience: list[float] = []

    def read(self, reads: Sequence[Read], deadline: float) -> ReadReport:
        self.patience.append(deadline - time.monotonic())
        elements = sum(run.elements for read in reads for run in read.runs)
        return ReadReport(4 * elements, elements / 1_000, ())


def test_a_read_has_the_time_that_its_elements_took_before_and_more():
    scene, _ = in_one_process(1, "adam", Sizes(2, 300, 1.0))
    stream, paced = scene.targets[0].stream, Paced()
    stream._transport = paced  # pyright: ignore[reportAttributeAccessIssue]
    for elements in (100, 1_000_000, 100_000, 100):
        stream._read([Read(1, "master", (CopyRuns(0, 0, elements),))])
    assert paced.patience == pytest.approx([5.0, 5.0, 400.0, 5.0], abs=0.5)
