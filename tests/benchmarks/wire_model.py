"""How long reads take where each node has one network card: max-min fair shares of the cards, read after read. Pure.

Each reader reads one tile after the other, and all parts of a tile at once, as `streaming.reader` does. What comes from
the reader's own node does not pass a card.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOGETHER, SLACK = 1.02, 1 / 500
"""Reads that end within so much of the first one, or of the least time of all, end with the last of them. It only makes
the time longer."""


@dataclass(frozen=True, slots=True)
class Reader:
    """`tiles`: of each tile the bytes from each other node, as (node, bytes)."""

    node: int
    tiles: tuple[tuple[tuple[int, float], ...], ...]


def least_seconds(readers: Sequence[Reader], nodes: int, bytes_per_s: float) -> float:
    """No order of reads is faster: the bytes of the busiest card, in or out, at its rate."""
    given, taken = np.zeros(nodes), np.zeros(nodes)
    for reader in readers:
        for node, size in (part for tile in reader.tiles for part in tile):
            given[node] += size
            taken[reader.node] += size
    return float(max(given.max(), taken.max())) / bytes_per_s


def seconds(readers: Sequence[Reader], nodes: int, bytes_per_s: float) -> float:
    """Until the last reader has all of its tiles."""
    queues = [iter(reader.tiles) for reader in readers]
    source, target, left, owner = (np.empty(0, kind) for kind in (np.int64, np.int64, np.float64, np.int64))
    due, now, slack = list(range(len(readers))), 0.0, SLACK * least_seconds(readers, nodes, bytes_per_s)
    while True:
        begun = [(node, readers[at].node, size, at) for at in due for node, size in next(queues[at], ())]
        if begun:
            columns = list(zip(*begun, strict=True))
            source = np.concatenate([source, np.array(columns[0], np.int64)])
            target = np.concatenate([target, np.array(columns[1], np.int64)])
            left = np.concatenate([left, np.array(columns[2], np.float64)])
            owner = np.concatenate([owner, np.array(columns[3], np.int64)])
        if not len(left):
            return now
        rate = shares(source, target, nodes) * bytes_per_s
        needed = left / rate
        ends = needed <= needed.min() * TOGETHER + slack
        passed = float(needed[ends].max())
        now += passed
        left = np.maximum(left - rate * passed, 0.0)
        ended, going = set(owner[ends].tolist()), ~ends
        source, target, left, owner = source[going], target[going], left[going], owner[going]
        due = sorted(ended - set(owner.tolist()))


def shares(source: np.ndarray, target: np.ndarray, nodes: int) -> np.ndarray:
    """The part of a card that each flow gets: the fullest card divides what it has evenly, then the next fullest."""
    pairs, of_pair, many = np.unique(source * nodes + target, return_inverse=True, return_counts=True)
    found, open_, room = np.zeros(len(pairs)), np.ones(len(pairs), bool), np.ones(2 * nodes)
    cards, weight = np.stack([pairs // nodes, nodes + pairs % nodes]), np.tile(many, 2)
    while open_.any():
        both = np.tile(open_, 2)
        crowd = np.bincount(cards.ravel()[both], weight[both], minlength=2 * nodes)
        share = np.divide(room, crowd, out=np.full(2 * nodes, np.inf), where=crowd > 0)
        least = share.min()
        full = share <= least * (1 + 1e-9)
        fixed = open_ & (full[cards[0]] | full[cards[1]])
        found[fixed] = least
        both = np.tile(fixed, 2)
        room -= np.bincount(cards.ravel()[both], weight[both], minlength=2 * nodes) * least
        room = np.maximum(room, 0.0)
        open_ &= ~fixed
    return found[of_pair]
