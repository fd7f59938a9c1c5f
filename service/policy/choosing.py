"""LiveR's policy: weigh every option by its utility and change only where that gains enough. Pure.

An option is a place, a layout and a number of spares. What the job runs on next must be up already; what it should
hold may have to be bought first, while it trains.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from service.policy.types import (
    Candidate,
    Market,
    PolicyDecision,
    PolicyInputs,
    PolicyVerdict,
    PoolView,
    ScoredOption,
)
from service.policy.utility import (
    HOUR_S,
    Curve,
    changes_per_s,
    curve_of,
    horizon_s,
    tokens_of_one_gain,
    tokens_of_one_loss,
    value_of_token,
)

ALTERNATIVES_SHOWN_MAX = 16
TIES = 1e-9
MARGIN = 0.05
"""What a job would change to must leave so much of the time to its deadline, or of its money. Once chosen, all of it
may be used: while the job runs so, what it needs and what is left fall alike, so that it is not changed back."""
_Option = tuple[ScoredOption, Candidate]
_Filled = list[tuple[PoolView, int]]
"""How many nodes of each pool."""


@dataclass(frozen=True, slots=True)
class Weighing:
    """What every option of one decision is weighed with. `slack_s`: time left beyond what the job needs if it runs
    without a break. `has_rescue`: a layout fits on-demand nodes that may be bought. `late_s`: how much later than the
    deadline the job ends on spot nodes, which it may not leave, whatever is done. `now_tokens_per_s`: what it makes as
    long as nothing is changed."""

    inputs: PolicyInputs
    curve: Curve
    usd_per_token: float
    slack_s: float
    has_rescue: bool
    late_s: float = 0.0
    now_tokens_per_s: float = 0.0

    def goes_on(self, layout: str, place: str, pools: _Filled) -> bool:
        """Whether this is what the job runs on now, and may go on with: on the same nodes."""
        standing = self.inputs.standing
        if standing is None or not standing.is_whole or (standing.layout, standing.place) != (layout, place):
            return False
        hold = {pool.pool: count for pool, count in pools}
        return all(hold.get(pool, 0) >= count for pool, count in standing.use)

    def change_s(self, candidate: Candidate, place: str, pools: _Filled) -> float:
        """Training time that the option loses before its first step; the state may be on its way for some of it."""
        standing = self.inputs.standing
        if self.goes_on(candidate.layout, place, pools):
            return 0.0
        is_there = standing is not None and standing.place == place
        move_s = max((pool.move_s for pool, count in pools if count), default=0.0)
        return candidate.change_s if is_there else max(candidate.change_s, self.inputs.knobs.start_s) + move_s

    def utility(self, candidate: Candidate, place: str, pools: _Filled, spares: int) -> float:
        """USD per hour; see `service.policy.utility`."""
        prices = moved_usd = losses = gains = changes = 0.0
        for pool, count in pools:
            prices += pool.usd_per_hour * count
            if not count:
                continue
            changes += changes_per_s(pool)
            moved_usd = max(moved_usd, pool.move_usd)
            if pool.market is Market.SPOT and pool.life_s < inf:
                losses += tokens_of_one_loss(self.curve, candidate, spares, pool) * HOUR_S / pool.life_s
            if pool.grows_in_s < inf and pool.acquire_s:
                gains += tokens_of_one_gain(self.curve, candidate, spares, pool) * HOUR_S / pool.grows_in_s
        horizon = horizon_s(self.inputs.knobs, changes)
        change_s = self.change_s(candidate, place, pools)
        if self.goes_on(candidate.layout, place, pools):
            moved_usd = 0.0
        worth = self.usd_per_token * candidate.tokens_per_s * HOUR_S * (max(0.0, horizon - change_s) / horizon)
        return worth - prices - moved_usd * HOUR_S / horizon - self.usd_per_token * (losses - gains)

    def is_lost(self) -> bool:
        """Whether the deadline is missed whatever is done, by more than step times may be off: nothing is left of it to
        keep time for."""
        return self.slack_s < -MARGIN * (self.inputs.goal.deadline_in_s - self.slack_s)

    def is_safe(self, candidate: Candidate, place: str, pools: _Filled) -> bool:
        """Whether the deadline holds if the option is lost at the next decision and the job then starts on on-demand
        nodes, which nobody takes back; where there are none, no time is kept for that."""
        is_kept = all(pool.market is Market.ON_DEMAND for pool, count in pools if count)
        if self.slack_s == inf or not self.has_rescue or self.is_lost() or is_kept:
            return True
        standing = self.inputs.standing
        starts_s = self.change_s(candidate, place, pools)
        if standing is not None and self.goes_on(candidate.layout, place, pools):
            starts_s = standing.starting_s
        knobs = self.inputs.knobs
        return self.slack_s - min(starts_s, knobs.decides_every_s) >= knobs.rescued_s

    def grade(self, option: ScoredOption) -> int:
        """2: the job ends in time and within its budget if it goes on so until its end; 1: within its budget only; else
        0. The fastest layout is in time as far as any is."""
        goal = self.inputs.goal
        if goal.tokens_left == inf or not option.tokens_per_s:
            return 2
        standing = self.inputs.standing
        is_present = standing is not None and (standing.layout, standing.place) == (option.layout, option.place)
        share = 1.0 if is_present else 1.0 - MARGIN
        needs_s = goal.tokens_left / option.tokens_per_s
        if self.usd_to_end(option) > goal.budget_left_usd * share:
            return 0
        is_fastest = option.tokens_per_s >= self.curve.best[-1].tokens_per_s
        return 2 if is_fastest or needs_s <= goal.deadline_in_s * share else 1

    def usd_to_end(self, option: ScoredOption) -> float:
        return self.inputs.goal.tokens_left / option.tokens_per_s / HOUR_S * option.usd_per_hour

    def waits_s(self, option: ScoredOption) -> float:
        """Until its nodes are up."""
        if _is_up(self.inputs, option):
            return 0.0
        hold = dict(option.hold)
        return max(pool.acquire_s for pool in self.inputs.pools if hold.get(pool.pool, 0) > pool.held)

    def starts_s(self, option: ScoredOption, candidate: Candidate) -> float:
        """From its nodes being up to its first step."""
        hold, standing = dict(option.hold), self.inputs.standing
        pools = [(pool, hold.get(pool.pool, 0)) for pool in self.inputs.pools if pool.place == option.place]
        if standing is not None and self.goes_on(candidate.layout, option.place, pools):
            return standing.starting_s
        return self.change_s(candidate, option.place, pools)

    def done_by_deadline(self, option: ScoredOption, candidate: Candidate) -> float:
        """Tokens that the job makes until then if it changes to the option as soon as its nodes are up."""
        left_s, waits_s = self.inputs.goal.deadline_in_s, self.waits_s(option)
        works_s = max(0.0, left_s - waits_s - self.starts_s(option, candidate))
        return self.now_tokens_per_s * min(waits_s, left_s) + option.tokens_per_s * works_s

    def may_wait(self) -> bool:
        """Whether spot nodes may still be started if nothing is done until the next decision."""
        knobs = self.inputs.knobs
        return self.slack_s >= 2 * knobs.decides_every_s + 2 * knobs.rescued_s


class UtilityPolicy:
    """The policy that the service runs."""

    name = "liver"

    def decide(self, inputs: PolicyInputs) -> PolicyDecision:
        return decide(inputs)


def decide(inputs: PolicyInputs) -> PolicyDecision:
    """What the job should run on next and what it should hold."""
    curve = curve_of(_allowed(inputs))
    usd_per_token, why = value_of_token(inputs, curve)
    weighing = Weighing(inputs, curve, usd_per_token, _slack_s(inputs, curve), _has_rescue(inputs, curve))
    options = sorted(_options(weighing, up_only=False), key=_rank)
    if late_s := _late_s(weighing, options):
        weighing = replace(weighing, late_s=late_s, now_tokens_per_s=_now_tokens_per_s(inputs))
    shown = tuple(option for option, _ in options[:ALTERNATIVES_SHOWN_MAX])
    alert = _alert(weighing)
    if inputs.goal.budget_left_usd <= 0:
        return PolicyDecision(PolicyVerdict.PAUSE, "the budget is spent", alternatives=shown, alert=alert)
    if not options:
        return _wait(weighing, alert)
    best, current = _best(weighing, options), _current(weighing)
    if current is not None and _stays(weighing, best, current):
        best = current
    if best.utility_usd_per_hour <= 0 and weighing.may_wait() and not weighing.late_s:
        reason = f"nothing that could be had is worth its price: {why}"
        return PolicyDecision(PolicyVerdict.PAUSE, reason, alternatives=shown, alert=alert)
    run = best if _is_up(inputs, best) else _run_meanwhile(weighing, current)
    chosen = best if run is None or run is best else replace(run, hold=_both(run, best))
    verdict = verdict_of(inputs, run)
    return PolicyDecision(verdict, _reason(verdict, chosen, current, why), chosen, shown, alert, best)


def _best(weighing: Weighing, options: list[_Option]) -> ScoredOption:
    """The most useful of those that keep deadline and budget. A budget is a bound, and a deadline a wish within it:
    where nothing keeps both, the fastest that the budget pays for, or what costs least to the end. Where the deadline
    is missed on spot nodes alone, what gets most done until then."""
    found = [option for option, _ in options]
    grade = max(weighing.grade(option) for option in found)
    if weighing.late_s and grade:
        paid = [each for each in options if weighing.grade(each[0])]
        return max(paid, key=lambda each: (weighing.done_by_deadline(*each), each[0].utility_usd_per_hour))[0]
    kept = [option for option in found if weighing.grade(option) == grade]
    if grade == 2:
        return kept[0]
    return max(kept, key=lambda each: each.tokens_per_s) if grade else min(kept, key=weighing.usd_to_end)


def _stays(weighing: Weighing, best: ScoredOption, current: ScoredOption) -> bool:
    """Whether what the job runs on is kept: another option must gain enough, and one that keeps deadline and budget
    better always does."""
    grade, other = weighing.grade(current), weighing.grade(best)
    if weighing.late_s and grade and other:
        return _done_by_deadline(weighing, current) >= _done_by_deadline(weighing, best)
    if grade != other:
        return grade > other
    if grade == 2:
        return not _gains_enough(weighing.inputs, best, current)
    if grade == 1:
        return current.tokens_per_s >= best.tokens_per_s
    return weighing.usd_to_end(current) <= weighing.usd_to_end(best)


def _done_by_deadline(weighing: Weighing, option: ScoredOption) -> float:
    candidate = next(each for each in weighing.inputs.candidates if each.layout == option.layout)
    return weighing.done_by_deadline(option, candidate)


def _wait(weighing: Weighing, alert: str) -> PolicyDecision:
    """Of no options. Nodes that are up are kept where more are to be had sooner than it takes to buy these again."""
    inputs = weighing.inputs
    reason = "no layout fits what can be had"
    if not weighing.curve.best:
        return PolicyDecision(PolicyVerdict.PAUSE, reason, alert=alert)
    usd_per_hour = sum(pool.usd_per_hour * pool.held for pool in inputs.pools)
    grows_in_s = min((pool.grows_in_s for pool in inputs.pools), default=inf)
    again_s = max((pool.acquire_s for pool in inputs.pools), default=0.0)
    worth_again = weighing.usd_per_token * weighing.curve.best[0].tokens_per_s * HOUR_S * again_s
    if inputs.knobs.releases and usd_per_hour * grows_in_s > worth_again:
        reason = f"{reason}; holding nodes until more come costs more than buying them again"
        return PolicyDecision(PolicyVerdict.PAUSE, reason, alert=alert)
    counts = ((pool.pool, _capacity(pool, False) if pool.market is Market.SPOT else pool.held) for pool in inputs.pools)
    hold = tuple((pool, count) for pool, count in counts if count)
    option = ScoredOption("", "", 0, hold, 0.0, usd_per_hour, -usd_per_hour)
    return PolicyDecision(PolicyVerdict.PAUSE, f"{reason}; the nodes are kept until more come", option, alert=alert)


def _allowed(inputs: PolicyInputs) -> tuple[Candidate, ...]:
    standing = inputs.standing
    if not inputs.knobs.is_reproducible or standing is None:
        return inputs.candidates
    degree = tensor_degree(standing.layout)
    return tuple(each for each in inputs.candidates if tensor_degree(each.layout) == degree)


def tensor_degree(layout: str) -> str:
    """`TP2` of `TP2xPP3`; TP1 where the layout does not name it."""
    return next((part for part in layout.split("x") if part.startswith("TP")), "TP1")


def _options(weighing: Weighing, *, up_only: bool) -> Iterator[_Option]:
    """Every option on what is up, or on what could be had."""
    inputs = weighing.inputs
    for place in sorted({pool.place for pool in inputs.pools}):
        pools = [pool for pool in inputs.pools if pool.place == place and _may_buy(pool, inputs)]
        there = sum(_capacity(pool, up_only) for pool in pools)
        orders = _orders(pools)
        for candidate in weighing.curve.best:
            if candidate.nodes > there:
                break
            for spares in _spares(there - candidate.nodes, inputs):
                for filled in _fillings(orders, candidate.nodes, spares, up_only=up_only):
                    if weighing.is_safe(candidate, place, filled):
                        yield _scored(weighing, candidate, place, filled, spares), candidate


def _orders(pools: list[PoolView]) -> list[list[PoolView]]:
    """The cheapest pools first; and, where a place has several, those that last longest, on-demand nodes before others.
    Of pools that are alike, those with nodes that are up: none are bought that are there already."""
    orders = [sorted(pools, key=lambda pool: (pool.usd_per_hour, -pool.held, pool.pool))]
    if len(pools) > 1:
        orders.append(sorted(pools, key=_by_life))
    return orders


def _by_life(pool: PoolView) -> tuple[float, bool, float, int, str]:
    return (-pool.life_s, pool.market is Market.SPOT, pool.usd_per_hour, -pool.held, pool.pool)


def _fillings(orders: list[list[PoolView]], nodes: int, spares: int, *, up_only: bool) -> list[_Filled]:
    """Nodes from the pools in each of the orders; what is the same twice counts once."""
    found: list[_Filled] = []
    for order in orders:
        filled = _filled(order, nodes, spares, up_only=up_only)
        if filled is not None and not any(_counts(filled) == _counts(other) for other in found):
            found.append(filled)
    return found


def _counts(filled: _Filled) -> dict[str, int]:
    return {pool.pool: count for pool, count in filled if count}


def _spares(most: int, inputs: PolicyInputs) -> range:
    """How many spares are weighed."""
    return range(min(most, inputs.knobs.spares_max) + 1)


def _may_buy(pool: PoolView, inputs: PolicyInputs) -> bool:
    return pool.market is Market.SPOT or inputs.knobs.on_demand or pool.held > 0


def _capacity(pool: PoolView, up_only: bool) -> int:
    return pool.held if up_only else pool.obtainable


def _filled(pools: list[PoolView], nodes: int, spares: int, *, up_only: bool) -> _Filled | None:
    """Nodes from the pools in their order; spares are spot nodes. None where spares would have to be on-demand."""
    filled: _Filled = []
    left = nodes + spares
    for pool in pools:
        most = _capacity(pool, up_only)
        wanted = left if pool.market is Market.SPOT else max(0, left - spares)
        taken = min(most, wanted)
        filled.append((pool, taken))
        left -= taken
    return filled if left == 0 else None


def _scored(weighing: Weighing, candidate: Candidate, place: str, filled: _Filled, spares: int) -> ScoredOption:
    inputs, use, paid_anyway = weighing.inputs, _used(filled, candidate.nodes), 0.0
    if not inputs.knobs.releases:
        filled = [(pool, max(count, _capacity(pool, pool.market is Market.ON_DEMAND))) for pool, count in filled]
        paid_anyway = sum(pool.usd_per_hour * count for pool, count in filled if pool.market is Market.SPOT)
    return ScoredOption(
        layout=candidate.layout,
        place=place,
        nodes=candidate.nodes,
        hold=tuple((pool.pool, count) for pool, count in filled if count),
        tokens_per_s=candidate.tokens_per_s,
        usd_per_hour=sum(pool.usd_per_hour * count for pool, count in filled),
        utility_usd_per_hour=weighing.utility(candidate, place, filled, spares) + paid_anyway,
        use=use,
    )


def _used(filled: _Filled, nodes: int) -> tuple[tuple[str, int], ...]:
    """What it runs on: all on-demand nodes, which are no spares, and of the others the first."""
    used, left = [], nodes - sum(count for pool, count in filled if pool.market is Market.ON_DEMAND)
    for pool, count in filled:
        taken = count if pool.market is Market.ON_DEMAND else min(left, count)
        left -= 0 if pool.market is Market.ON_DEMAND else taken
        used.append((pool.pool, taken))
    return tuple((pool, count) for pool, count in used if count)


def _rank(option: _Option) -> tuple[float, float, int, str, str]:
    scored = option[0]
    return (-scored.utility_usd_per_hour, scored.usd_per_hour, scored.nodes, scored.place, scored.layout)


def _current(weighing: Weighing) -> ScoredOption | None:
    """What the job runs on, with as many spares as are worth it; None where it cannot go on."""
    inputs = weighing.inputs
    standing = inputs.standing
    if standing is None or not standing.is_whole:
        return None
    candidate = next((each for each in inputs.candidates if each.layout == standing.layout), None)
    if candidate is None:
        return None
    pools = [pool for pool in inputs.pools if pool.place == standing.place]
    pools.sort(key=lambda pool: (pool.usd_per_hour, pool.pool))
    used = dict(standing.use)
    found: list[ScoredOption] = []
    room = sum(max(0, _capacity(pool, False) - used.get(pool.pool, 0)) for pool in pools if pool.market is Market.SPOT)
    for spares in _spares(room, inputs):
        filled, left = [], spares
        for pool in pools:
            base = used.get(pool.pool, 0)
            extra = min(left, max(0, _capacity(pool, False) - base)) if pool.market is Market.SPOT else 0
            filled.append((pool, base + extra))
            left -= extra
        if weighing.is_safe(candidate, standing.place, filled):
            scored = _scored(weighing, candidate, standing.place, filled, spares)
            found.append(replace(scored, use=standing.use))
    return max(found, key=lambda each: (each.utility_usd_per_hour, -each.usd_per_hour), default=None)


def _gains_enough(inputs: PolicyInputs, best: ScoredOption, current: ScoredOption) -> bool:
    if _is_on_demand(inputs, current) and not _is_on_demand(inputs, best) and inputs.served_s < inputs.knobs.patience_s:
        return False
    hold = dict(best.hold)
    is_same = (best.layout, best.place) == (current.layout, current.place)
    if is_same and all(hold.get(pool, 0) >= count for pool, count in current.use):
        return best.utility_usd_per_hour > current.utility_usd_per_hour + TIES
    least = inputs.knobs.gain_min * abs(current.utility_usd_per_hour)
    return best.utility_usd_per_hour > current.utility_usd_per_hour + max(least, TIES)


def _is_on_demand(inputs: PolicyInputs, option: ScoredOption) -> bool:
    bought = {pool.pool for pool in inputs.pools if pool.market is Market.ON_DEMAND}
    return any(pool in bought for pool, _ in option.hold)


def _is_up(inputs: PolicyInputs, option: ScoredOption) -> bool:
    up = {pool.pool: pool.held for pool in inputs.pools}
    missing = sum(max(0, count - up.get(pool, 0)) for pool, count in option.hold)
    return missing <= option.spares


def _run_meanwhile(weighing: Weighing, current: ScoredOption | None) -> ScoredOption | None:
    """What to run until all of the nodes of the best option are up; None to wait for them."""
    options = sorted(_options(weighing, up_only=True), key=_rank)
    now = _best(weighing, options) if options else None
    if current is not None and (now is None or _stays(weighing, now, current)):
        return current
    return now if now is not None and (now.utility_usd_per_hour > 0 or weighing.late_s) else None


def _both(run: ScoredOption, best: ScoredOption) -> tuple[tuple[str, int], ...]:
    """What the best option needs, and until it is up what the job runs on; the spares are those of the best option."""
    hold, spare = dict(best.hold), run.spares
    for pool, count in run.hold:
        used = max(0, count - spare)
        spare -= count - used
        hold[pool] = max(hold.get(pool, 0), used)
    return tuple((pool, count) for pool, count in hold.items() if count)


def verdict_of(inputs: PolicyInputs, run: ScoredOption | None) -> PolicyVerdict:
    """What running this option means for what the job runs on now. None: nothing new is run."""
    standing = inputs.standing
    if standing is None:
        return PolicyVerdict.START
    if run is None:
        return PolicyVerdict.PAUSE if not standing.is_whole else PolicyVerdict.STAY
    is_same = standing.is_whole and standing.layout == run.layout and standing.place == run.place
    return PolicyVerdict.STAY if is_same else PolicyVerdict.MOVE


def _slack_s(inputs: PolicyInputs, curve: Curve) -> float:
    goal = inputs.goal
    if not curve.best or goal.deadline_in_s == inf or goal.tokens_left == inf:
        return inf
    return goal.deadline_in_s - goal.tokens_left / curve.best[-1].tokens_per_s


def _has_rescue(inputs: PolicyInputs, curve: Curve) -> bool:
    there = Counter[str]()
    for pool in inputs.pools:
        if pool.market is Market.ON_DEMAND and _may_buy(pool, inputs):
            there[pool.place] += pool.obtainable
    return bool(curve.best) and max(there.values(), default=0) >= curve.best[0].nodes


def _late_s(weighing: Weighing, options: list[_Option]) -> float:
    inputs, goal = weighing.inputs, weighing.inputs.goal
    if weighing.has_rescue or not options or weighing.slack_s == inf or goal.deadline_in_s <= 0:
        return 0.0
    longest_s = max(pool.acquire_s + pool.move_s for pool in inputs.pools) + inputs.knobs.start_s
    if weighing.slack_s > longest_s + max(candidate.change_s for _, candidate in options):
        return 0.0
    ends_s = min(
        weighing.waits_s(option) + weighing.starts_s(option, candidate) + goal.tokens_left / option.tokens_per_s
        for option, candidate in options
    )
    return max(0.0, ends_s - goal.deadline_in_s)


def _now_tokens_per_s(inputs: PolicyInputs) -> float:
    standing = inputs.standing
    if standing is None or not standing.is_whole:
        return 0.0
    return next((each.tokens_per_s for each in inputs.candidates if each.layout == standing.layout), 0.0)


def _alert(weighing: Weighing) -> str:
    slack_s = weighing.slack_s
    if weighing.inputs.goal.budget_left_usd <= 0:
        return "the budget is spent and the job is not done"
    if slack_s < 0:
        return f"the deadline will be missed by {-slack_s / HOUR_S:.3g} h, even on all nodes without a break"
    if weighing.late_s:
        return f"the deadline will be missed by {weighing.late_s / HOUR_S:.3g} h, with the time that a start takes"
    if not weighing.has_rescue and slack_s < weighing.inputs.knobs.rescued_s:
        return "the deadline will be missed if nodes are lost: no time is left for another start"
    return ""


def _reason(verdict: PolicyVerdict, chosen: ScoredOption, current: ScoredOption | None, why: str) -> str:
    spares = f" and {chosen.spares} spares" if chosen.nodes and chosen.spares > 0 else ""
    what = f"{chosen.layout} on {chosen.nodes} nodes{spares} in {chosen.place}: {chosen.utility_usd_per_hour:.4g} USD/h"
    if verdict is PolicyVerdict.STAY:
        return f"{what}, and nothing gains enough over it; {why}"
    if current is not None:
        return f"{what} instead of {current.utility_usd_per_hour:.4g} USD/h in {current.layout}; {why}"
    return f"{what}; {why}"
