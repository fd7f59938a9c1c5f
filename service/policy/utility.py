"""What an option is worth in USD per hour: the value of its tokens, less prices, moves and what losses will cost. Pure.

U(x) = V T(x) (L - c) / L - prices - moves / L - V x tokens lost by losses; V: worth of a token, L: expected time until
the capacity changes, c: training time that the change to x loses. A loss that touches the job's nodes costs a change;
where it takes more than the spares, the job runs on fewer until others are bought.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import comb, exp, inf

from service.policy.types import Candidate, PolicyInputs, PolicyKnobs, PoolView, PriceHad

HOUR_S = 3_600.0
STARTS_KEPT = 4
"""A job with a deadline keeps time for so many starts: what is not needed in the end was never dear."""
WORTH_FACTOR = 2.5
"""Where the user says nothing, a token is worth so many times what it costs on on-demand nodes: training that stands
still costs more than its nodes."""
WAIT_FACTOR = 1.03
"""Waiting for capacity that is cheaper by less than this is not worth the time that it takes from the slack."""


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """The best candidate for each number of nodes, and those that are worth their nodes: more nodes, more tokens.
    `curve_of` makes one of the same candidates, so that each is equal to itself only."""

    best: tuple[Candidate, ...]
    rates: tuple[float, ...]

    def tokens_per_s(self, nodes: int) -> float:
        """Of the best candidate on so many nodes or fewer."""
        return self.rates[nodes if nodes < len(self.rates) else -1] if nodes > 0 else 0.0


@lru_cache(maxsize=256)
def curve_of(candidates: tuple[Candidate, ...]) -> Curve:
    """Only candidates that no other one beats on as many nodes or fewer, by number of nodes."""
    kept: list[Candidate] = []
    for found in sorted(candidates, key=lambda each: (each.nodes, -each.tokens_per_s, each.layout)):
        if not kept or found.tokens_per_s > kept[-1].tokens_per_s:
            kept.append(found)
    rates = [0.0]
    for found in kept:
        rates += [rates[-1]] * (found.nodes - len(rates))
        rates.append(found.tokens_per_s)
    return Curve(tuple(kept), tuple(rates))


def value_of_token(inputs: PolicyInputs, curve: Curve) -> tuple[float, str]:
    """USD for one token, and why. The user's own value; with a deadline what the slack allows; else a multiple of what
    it costs on on-demand nodes in the fastest layout."""
    goal = inputs.goal
    if goal.usd_per_mtok is not None:
        return goal.usd_per_mtok / 1e6, f"a token is worth what the job says, {goal.usd_per_mtok:g} USD per million"
    if not curve.best:
        return 0.0, "no layout fits"
    fastest = curve.best[-1]
    per_token_at = fastest.nodes / fastest.tokens_per_s / HOUR_S
    on_demand = inputs.usd_per_hour_on_demand * per_token_at
    if goal.deadline_in_s == inf or goal.tokens_left == inf:
        return WORTH_FACTOR * on_demand, f"a token is worth {WORTH_FACTOR:g} times what it costs on on-demand nodes"
    share = share_of_time(inputs, fastest.tokens_per_s)
    waits_s = max(0.0, goal.deadline_in_s - goal.tokens_left / fastest.tokens_per_s - inputs.knobs.rescued_s)
    enough = [(_holding_out_usd(inputs, had, waits_s), had) for had in inputs.had if had.share >= share]
    if enough:
        usd, had = min(enough, key=lambda each: each[0])
        return usd * WAIT_FACTOR * per_token_at, (
            f"the job must run for {share:.0%} of the time left and may wait {waits_s / HOUR_S:.2g} h; nodes "
            f"were to be had at {had.usd_per_hour:.4g} USD per hour or less for {had.share:.0%} of the time, and came "
            f"back in {had.gap_s / HOUR_S:.2g} h: an hour is worth {usd:.4g} USD"
        )
    return on_demand, f"the job must run for {share:.0%} of the time left: any price up to on-demand is right"


def _holding_out_usd(inputs: PolicyInputs, had: PriceHad, waits_s: float) -> float:
    """What an hour of a node comes to for who takes nothing dearer than this: where the next gap, with the start behind
    it, outlasts the time that is left to wait, what is left runs on demand. Gaps are as if they ended by chance alone
    (exponential), which makes one look at the future, and none into it."""
    gap_s = had.gap_s + inputs.knobs.start_s
    late = exp(-waits_s / gap_s) if gap_s > 0 else 0.0
    return had.usd_per_hour * (1.0 - late) + inputs.usd_per_hour_on_demand * late


def share_of_time(inputs: PolicyInputs, tokens_per_s: float) -> float:
    """The share of the time left for which the job must run at this rate to be done in time; may be above 1."""
    goal = inputs.goal
    needs_s = goal.tokens_left / tokens_per_s + STARTS_KEPT * inputs.knobs.start_s
    return needs_s / goal.deadline_in_s if goal.deadline_in_s > 0 else inf


@lru_cache(maxsize=100_000)
def victims_among(held: int, of: int, lost: int) -> tuple[float, ...]:
    """The chance that a loss of `lost` of `of` nodes, each as likely, takes 0, 1, 2 ... of the `held` ones."""
    lost = min(lost, of)
    ways = comb(of, lost)
    return tuple(comb(held, taken) * comb(of - held, lost - taken) / ways for taken in range(min(held, lost) + 1))


def tokens_of_one_loss(curve: Curve, candidate: Candidate, spares: int, pool: PoolView) -> float:
    """Tokens that the next loss of the pool is expected to cost an option that has its nodes there. Each node that the
    pool's life was seen on is as likely to go, and what would be bought joins them."""
    there, costs = max(pool.exposed, candidate.nodes + spares), (candidate.change_s, candidate.tokens_per_s)
    return _tokens_of_loss(curve, candidate.nodes, costs, spares, there, (pool.acquire_s, pool.group_sizes))


@lru_cache(maxsize=100_000)
def _tokens_of_loss(
    curve: Curve,
    nodes: int,
    costs: tuple[float, float],
    spares: int,
    there: int,
    loses: tuple[float, tuple[tuple[int, float], ...]],
) -> float:
    """`costs`: seconds of a change, tokens per second; `loses`: seconds to buy a node again, sizes of losses."""
    (change_s, rate), (acquire_s, group_sizes) = costs, loses
    held, rates, lost_tokens = nodes + spares, curve.rates, 0.0
    for size, chance in group_sizes:
        touched = 1.0 - victims_among(nodes, there, size)[0]
        lost_tokens += chance * touched * change_s * rate
        if not acquire_s or size <= spares:
            continue
        likely = victims_among(held, there, size)
        missing_tokens = sum(
            likely[taken] * (rate - rates[max(0, min(held - taken, len(rates) - 1))])
            for taken in range(spares + 1, len(likely))
        )
        lost_tokens += chance * missing_tokens * (acquire_s + change_s)
    return lost_tokens


def tokens_of_one_gain(curve: Curve, candidate: Candidate, spares: int, pool: PoolView) -> float:
    """Tokens that the nodes held make possible at once when the pool offers one more, and that would else wait until
    nodes given back are bought again."""
    held = candidate.nodes + spares
    return (curve.tokens_per_s(held + 1) - curve.tokens_per_s(held)) * pool.acquire_s


def changes_per_s(pool: PoolView) -> float:
    """How often the pool changes what a job has to choose from: by a loss that takes a node which it could hold (in a
    large pool most losses take the nodes of other jobs), and by a node that comes."""
    if pool.life_s == inf:
        return 1.0 / pool.grows_in_s
    touched = _touched(pool.obtainable, max(pool.exposed, pool.obtainable), pool.group_sizes)
    return touched / pool.life_s + 1.0 / pool.grows_in_s


@lru_cache(maxsize=100_000)
def _touched(nodes: int, there: int, group_sizes: tuple[tuple[int, float], ...]) -> float:
    """The chance that a loss takes any of these nodes."""
    return sum(chance * (1.0 - victims_among(nodes, there, size)[0]) for size, chance in group_sizes)


def horizon_s(knobs: PolicyKnobs, changes_per_s: float) -> float:
    """L: the expected time until the capacity that an option uses changes, within the knobs' bounds."""
    expected = 1.0 / changes_per_s if changes_per_s > 0 else inf
    return min(max(expected, knobs.horizon_min_s), knobs.horizon_max_s)
