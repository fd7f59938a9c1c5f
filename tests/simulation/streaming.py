"""The follower against sources whose memory changes word by word while it reads word by word. Pure.

Every write of a source and every read of the follower is split into single words, interleaved at random. What is
resident must at all times equal the true state at the follower's version. `run_seeds` is for the long run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

from liver_core.reshard import CopyRuns, RankPlan, Transfer
from liver_core.streaming.follow import (
    Begin,
    Converged,
    Done,
    FollowEffect,
    Follower,
    FollowEvent,
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
from liver_core.streaming.tiles import LOCAL, cut_tiles

MODULUS = (1 << 31) - 1
ROUNDS_MAX = 20_000


class Violation(AssertionError):
    """An invariant is broken."""


@dataclass(slots=True)
class Faults:
    """Bugs of the source and of the one who carries effects out; those of the follower are subclasses of it."""

    slot_stays_valid: bool = False
    steps_with_an_even_counter: bool = False
    slot_off_by_one: bool = False
    header_read_late: bool = False
    guard_looked_at_before_only: bool = False


@dataclass(slots=True)
class Bug:
    """`follower` takes the place of the real one. A test looks for the bug from `first_seed` on."""

    follower: Callable[..., Follower] = Follower
    faults: Faults = field(default_factory=Faults)
    first_seed: int = 0


@cache
def true_state(version: int, peer: int, word: int) -> int:
    """What word number `word` of a source holds at a version: a chain that no step can be left out of."""
    if version == 0:
        return 7 * peer + word + 1
    return stepped(true_state(version - 1, peer, word), gradient(version, peer, word), rate(version))


def stepped(value: int, grad: int, lr: int) -> int:
    return (value * 31 + grad * lr + 1) % MODULUS


def gradient(step: int, peer: int, word: int) -> int:
    return (step * 1_000_003 + peer * 101 + word * 13) % 997 + 1


def rate(step: int) -> int:
    return step * 7 % 11 + 1


class SourceMemory:
    """One source: its memory as words, and a script that writes it one word at a time."""

    def __init__(self, peer: int, words: int, depth: int, version: int) -> None:
        self.peer = peer
        self.depth = depth
        self.version = version
        self.counter = 2 * version
        self.state = [true_state(version, peer, word) for word in range(words)]
        self.slots = [-1] * depth
        self.ring = [[0] * words for _ in range(depth)]
        self.headers = [[0, 0] for _ in range(depth)]

    def step(self, draw: random.Random, faults: Faults) -> Iterator[None]:
        """One optimizer step; yields after every word that becomes visible."""
        yield from self._publish(draw, faults)
        if not faults.steps_with_an_even_counter:
            self.counter = 2 * self.version + 1
            yield
        for word in shuffled(draw, range(len(self.state))):
            grad = gradient(self.version + 1, self.peer, word)
            self.state[word] = stepped(self.state[word], grad, rate(self.version + 1))
            yield
        self.version += 1
        self.counter = 2 * self.version
        yield

    def _publish(self, draw: random.Random, faults: Faults) -> Iterator[None]:
        version = self.version + 1
        slot = version % self.depth
        if not faults.slot_stays_valid:
            self.slots[slot] = 2 * version - 1
            yield
        for word in shuffled(draw, range(len(self.state))):
            self.ring[slot][word] = gradient(version, self.peer, word)
            yield
        for index, value in shuffled(draw, enumerate((version, rate(version)))):
            self.headers[slot][index] = value
            yield
        self.slots[slot] = 2 * version
        yield


def shuffled(draw: random.Random, items) -> list:
    found = list(items)
    draw.shuffle(found)
    return found


class Streaming:
    """One run: some sources in lockstep, one follower, and what the follower's memory holds."""

    def __init__(self, seed: int, bug: Bug) -> None:
        self.draw = draw = random.Random(seed)
        self.bug = bug
        self.peers = [LOCAL, 3][: draw.randint(1, 2)]
        self.guarding = {LOCAL, *(peer for peer in self.peers if draw.random() < 0.5)}
        self.words = draw.randint(1, 3)
        self.depth = draw.randint(1, 3)
        start = draw.randint(0, 3)
        self.sources = {peer: SourceMemory(peer, self.words, self.depth, start) for peer in self.peers}
        self.finish_at = start + draw.randint(0, 10)
        self.finish_known = draw.randint(start, self.finish_at)
        self.amended_at = draw.randint(start, self.finish_at) if draw.random() < 0.4 else None
        self.hash_at = draw.randint(start, self.finish_at + 1) if draw.random() < 0.5 else None
        self.tail_on = draw.random() < 0.2
        self.speed = draw.choice((0.1, 0.3, 0.6))
        self.machine = self._new_follower()
        self.memory: dict[int, dict[str, int]] = {}
        self.outcome = ""
        self.told = False
        self.hash_told: int | None = None
        self.hashed: list[int] = []

    def _new_follower(self) -> Follower:
        total = self.words * len(self.peers)
        parts = [
            Transfer(max(peer, 0), (CopyRuns(0, at * self.words, self.words),), self.words)
            for at, peer in enumerate(self.peers)
        ]
        plan = RankPlan(0, parts[0], tuple(parts[1:]), "simulated")
        self.tiles = cut_tiles(plan, [(0, total)], self.draw.randint(1, total))
        batch_s = self.draw.choice((0.0, 2.0, 9.0))
        limits = FollowLimits(losses_max=self.draw.randint(1, 6), torn_max=200, batch_s=batch_s)
        return self.bug.follower(self.tiles, depth=self.depth, guarded=frozenset(self.guarding), limits=limits)

    # The world: sources step until the version to finish at, one word at a time.

    def run(self) -> None:
        """Interleave until the follower ends. Raises Violation."""
        scripts: dict[int, Iterator[None]] = {}
        reader = self._follow()
        for _ in range(ROUNDS_MAX):
            if self.draw.random() < self.speed:
                self._advance(scripts)
            elif next(reader, "ended") == "ended":
                return
        raise Violation(f"no end after {ROUNDS_MAX} rounds: version {self.machine.version}, todo {self.machine.todo}")

    def _advance(self, scripts: dict[int, Iterator[None]]) -> None:
        peer = self.draw.choice(self.peers)
        source = self.sources[peer]
        script = scripts.get(peer)
        if script is None:
            everyone = [each.version for each in self.sources.values()]
            if min(everyone) < source.version or source.version >= self.finish_at + self.tail_on:
                return
            script = scripts[peer] = source.step(self.draw, self.bug.faults)
        if next(script, "over") == "over":
            del scripts[peer]

    def _tell(self) -> None:
        """What the driver says to the follower, when it has learnt it."""
        seen = min(source.version for source in self.sources.values())
        if self.amended_at is not None and seen >= self.amended_at:
            self.machine, self.amended_at = self._new_follower(), None
            self.memory.clear()
            raise _Restarted
        if seen >= self.finish_known:
            self.told = True
            self.machine.finish(self.finish_at)
        if self.hash_at is not None and self.hash_at >= seen:
            self.machine.announce(self.hash_at)
            self.hash_told, self.hash_at = self.hash_at, None

    # The follower and its reads, one word at a time.

    def _follow(self) -> Iterator[None]:
        event: FollowEvent = Begin()
        while True:
            try:
                self._tell()
            except _Restarted:
                event = Begin()
            effects = self.machine.handle(event)
            self._check()
            for effect in effects:
                if isinstance(effect, Done | GiveUp):
                    self._ended(effect)
                    return
                if isinstance(effect, Converged | HashMissed):
                    continue
                answer: list[FollowEvent] = []
                for _ in self._carry_out(effect, answer):
                    yield
                event = answer[0]
            yield

    def _carry_out(self, effect: FollowEffect, answer: list[FollowEvent]) -> Iterator[None]:
        match effect:
            case Look(version=version, peers=peers):
                yield from self._look(version, peers, answer)
            case ReadTiles(tiles=tiles, version=version):
                yield from self._read_tiles(tiles, version, answer)
            case ReadGradients(version=version, tiles=tiles, peers=peers):
                yield from self._read_gradients(version, tiles, peers, answer)
            case Replay(header=header, tiles=tiles):
                if self.told and header.version > self.finish_at:
                    raise Violation(f"replays version {header.version}, told to finish at {self.finish_at}")
                lr = int(header.norm)
                if self.bug.faults.header_read_late:
                    lr = self.sources[min(self.peers)].headers[self._slot(header.version)][1]
                for word in (word for tile in tiles for _, _, word in self._words_of(tile)):
                    held = self.memory[word]
                    held["master"] = stepped(held["master"], held["grad"], lr)
                answer.append(Replayed(0.0))
            case Hash(version=version):
                self.hashed.append(version)
                self._check_whole(version)
                answer.append(Hashed())
            case Sleep():
                answer.append(Begin())

    def _look(self, version: int, peers: tuple[int, ...], answer: list[FollowEvent]) -> Iterator[None]:
        found: dict[tuple[str, int], int] = {}
        for what, peer in shuffled(self.draw, [(what, peer) for what in ("counter", "slot") for peer in peers]):
            source = self.sources[peer]
            found[what, peer] = source.counter if what == "counter" else source.slots[self._slot(version)]
            yield
        answer.append(
            Looked(tuple(found["counter", peer] for peer in peers), tuple(found["slot", peer] for peer in peers))
        )

    def _read_tiles(self, tiles: tuple[int, ...], version: int, answer: list[FollowEvent]) -> Iterator[None]:
        """Word by word, in any order. Who looks at a guard sends what it has read only when it has held."""
        held = dict.fromkeys(tiles, True)
        words = [(tile, *word) for tile in tiles for word in self._words_of(tile)]
        for tile, peer, source_word, word in shuffled(self.draw, words):
            source, faults, is_guarded = self.sources[peer], self.bug.faults, peer in self.guarding
            if is_guarded and source.counter != 2 * version:
                held[tile] = False
                continue
            yield
            value = source.state[source_word]
            yield
            if is_guarded and not faults.guard_looked_at_before_only and source.counter != 2 * version:
                held[tile] = False
                continue
            self.memory[word] = {"master": value, "grad": 0}
            yield
        known = {tile: self.guarding.issuperset(peer for peer, _, _ in self._words_of(tile)) for tile in tiles}
        reads = (TileRead(1, held[tile] if known[tile] or not held[tile] else None) for tile in tiles)
        answer.append(TilesRead(tuple(reads), 1.0))

    def _read_gradients(
        self, version: int, tiles: tuple[int, ...], peers: tuple[int, ...], answer: list[FollowEvent]
    ) -> Iterator[None]:
        slot = self._slot(version + self.bug.faults.slot_off_by_one)
        headers = {peer: [0, 0] for peer in peers}
        jobs: list[tuple[int, int, int | None]] = [
            (peer, source_word, word) for tile in tiles for peer, source_word, word in self._words_of(tile)
        ]
        jobs += [(peer, index, None) for peer in peers for index in range(2)]
        for peer, at, word in shuffled(self.draw, jobs):
            source = self.sources[peer]
            if word is None:
                headers[peer][at] = source.headers[self._slot(version)][at]
            else:
                self.memory[word]["grad"] = source.ring[slot][at]
            yield
        version, lr = headers[peers[0]]
        differs = "" if all(each == headers[peers[0]] for each in headers.values()) else "sources differ"
        answer.append(GradientsRead(StepHeader(version, float(lr), 0.0, (), {}, True), differs, 1, 0.0))

    def _slot(self, version: int) -> int:
        return version % self.depth

    def _words_of(self, tile: int) -> list[tuple[int, int, int]]:
        """(peer, word at the source, word here)."""
        return [
            (read.peer, s + i, t + i)
            for read in self.tiles[tile].reads
            for run in read.runs
            for s, t, length in run.each()
            for i in range(length)
        ]

    # Invariants.

    def _check(self) -> None:
        version = self.machine.version
        for tile in self.machine.resident:
            for peer, at, word in self._words_of(tile):
                truth = true_state(version, peer, at)
                if word not in self.memory or self.memory[word]["master"] != truth:
                    raise Violation(f"word {word} of tile {tile}: {self.memory.get(word)}, truth {truth}")

    def _check_whole(self, version: int) -> None:
        if not version == self.machine.version == self.hash_told or self.machine.todo:
            raise Violation(f"hashes at {self.machine.version} for {version}, todo {self.machine.todo}")

    def _ended(self, effect: Done | GiveUp) -> None:
        self.outcome = "done" if isinstance(effect, Done) else " ".join(effect.reason.split()[:3])
        if isinstance(effect, Done) and (effect.version != self.finish_at or self.machine.todo):
            raise Violation(f"done at {effect.version}, told {self.finish_at}")


# Planted bugs.


class ReadsTheCounterAfterATileOnly(Follower):
    deciding = False

    def _decide(self, slots: dict[int, int], before: dict[int, int]) -> tuple[FollowEffect, ...]:
        self.deciding = True
        try:
            return super()._decide(slots, before)
        finally:
            self.deciding = False

    def _stand(self, tile: int) -> bool:
        return self.deciding or super()._stand(tile)


class ReadsTheCounterBeforeATileOnly(ReadsTheCounterAfterATileOnly):
    def _stand(self, tile: int) -> bool:
        return not self.deciding or Follower._stand(self, tile)


class BelievesGradientsWithoutASecondLook(Follower):
    def _gradients_read(self, event: GradientsRead) -> tuple[FollowEffect, ...]:
        super()._gradients_read(event)
        assert event.header is not None
        self._gradients = replace(event, header=replace(event.header, version=self.version + 1), differs="")
        self._doing = type(self._doing).NOTHING
        return self._replay()


class GoesBeyondTheVersionToFinishAt(Follower):
    def finish(self, version: int) -> None:
        super().finish(version + 1)


class ReplaysOnlyWhatOnePeerHolds(Follower):
    def _slot(self, slots: dict[int, int], before: dict[int, int]):
        first = min(self._peers)
        return super()._slot(dict.fromkeys(slots, slots[first]), before)


class HashesOneVersionLate(Follower):
    def announce(self, version: int) -> None:
        super().announce(version + 1)


class BelievesWhatTheSourceSaysIsTorn(Follower):
    def _count_tiles(self, event: TilesRead) -> None:
        super()._count_tiles(event)
        self._read = tuple(replace(read, held=True if read.held is False else read.held) for read in self._read)


BUGS: dict[str, Bug] = {
    "believes what the source says is torn": Bug(BelievesWhatTheSourceSaysIsTorn),
    "guard looked at before the bytes only": Bug(faults=Faults(guard_looked_at_before_only=True)),
    "counter read after the tile only": Bug(ReadsTheCounterAfterATileOnly),
    "counter read before the tile only": Bug(ReadsTheCounterBeforeATileOnly),
    "gradients believed without a second look": Bug(BelievesGradientsWithoutASecondLook),
    "goes beyond the version to finish at": Bug(GoesBeyondTheVersionToFinishAt),
    "looks at one peer's slot only": Bug(ReplaysOnlyWhatOnePeerHolds),
    "hashes one version late": Bug(HashesOneVersionLate),
    "slot stays valid while it is overwritten": Bug(faults=Faults(slot_stays_valid=True)),
    "steps with an even counter": Bug(faults=Faults(steps_with_an_even_counter=True)),
    "slot off by one": Bug(faults=Faults(slot_off_by_one=True)),
    "header read outside the counters": Bug(faults=Faults(header_read_late=True)),
}


@dataclass(slots=True)
class Report:
    """`failures`: (seed, what is broken). `outcomes`: how often each ending was met."""

    seeds: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    replays: int = 0
    losses: int = 0
    torn: int = 0
    hashes: int = 0


def run_seeds(first: int, count: int, bug: str | None = None) -> Report:
    """Run `count` seeds from `first` on, with a planted bug where one is named. Never raises for what it finds."""
    report = Report()
    for seed in range(first, first + count):
        run = Streaming(seed, BUGS[bug] if bug is not None else Bug())
        try:
            run.run()
        except Violation as violation:
            report.failures.append((seed, str(violation)))
        counts = run.machine.counts
        report.seeds += 1
        report.outcomes[run.outcome or "violation"] += 1
        report.replays += counts.replays
        report.losses += counts.losses
        report.torn += counts.torn
        report.hashes += len(run.hashed)
    return report


class _Restarted(Exception):
    """The plan was amended: a new follower begins."""
