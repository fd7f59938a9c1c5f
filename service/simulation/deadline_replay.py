"""A job with a deadline on capacity of several places, tick by tick, under any policy. Pure.

The glue between a policy and a benchmark that says, at every tick, what could be had, at what price, and how much time
is left: `docs/examples/tick_by_tick.py` is the same in one page.
"""

from bisect import insort
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf

from service.policy.hazard import LifeTable, volatility
from service.policy.types import (
    Candidate,
    Goal,
    Market,
    Policy,
    PolicyInputs,
    PolicyKnobs,
    PolicyVerdict,
    PoolView,
    PriceHad,
    StandingWorld,
)
from service.simulation.places import DeadlineJob, PlaceSeries

ON_DEMAND = "on-demand"
GANG = "gang"
HOUR_S = 3_600.0
KEPT_PRICES_MAX = 4_096
LOSSES_KEPT_H = 24.0
NEVER_MOVES = 1e-9


class SpentOn(StrEnum):
    """What time and money of a run went into. Moving: nodes that wait until the state is there; egress: its bytes."""

    WORK = "work"
    START = "start"
    MOVING = "moving"
    IDLE = "idle"
    EGRESS = "egress"


@dataclass(frozen=True, slots=True)
class SpentRow:
    """One row of a run's ledger, in seconds since the job began. Egress has no length, being idle no price."""

    what: SpentOn
    place: str
    begin_s: float
    end_s: float
    usd: float


@dataclass(frozen=True, slots=True)
class DeadlineRun:
    """How it went. `done_at_s` is infinite where the work was not done in time. `ledger`: each moment until the end
    once, and each move; its dollars sum to `usd`."""

    usd: float
    done_at_s: float
    moves: int
    on_demand_s: float
    idle_s: float
    places: tuple[tuple[str, float], ...]
    ledger: tuple[SpentRow, ...] = field(repr=False, default=())

    @property
    def is_missed(self) -> bool:
        return self.done_at_s == inf

    @property
    def egress_usd(self) -> float:
        return sum(row.usd for row in self.ledger if row.what is SpentOn.EGRESS)


class Watch:
    """What a service that has watched the places knows of them: how long capacity lasts, and at what price it could be
    had. It looks at ticks that are over, never ahead."""

    def __init__(self, series: PlaceSeries, job: DeadlineJob) -> None:
        self._series, self._job = series, job
        self._tables = [LifeTable() for _ in series.places]
        self._since: list[int | None] = [None] * len(series.places)
        self._lost_at_h: list[list[float]] = [[] for _ in series.places]
        self._prices: list[float] = []
        self._order: list[float] = []
        self.seen = 0

    def see(self, tick: int) -> None:
        """The offers of one more tick."""
        series, tick_s = self._series, self._series.tick_s
        now_h, best = tick * tick_s / HOUR_S, inf
        for place, row in enumerate(series.offered):
            is_up, since = row[tick] >= self._job.gang, self._since[place]
            if since is not None:
                age = (tick - since) * tick_s
                self._tables[place].watch(max(0.0, age - tick_s), age, lost=not is_up)
                if not is_up:
                    self._lost_at_h[place] = [at for at in self._lost_at_h[place] if now_h - at <= LOSSES_KEPT_H]
                    self._lost_at_h[place].append(now_h)
            self._since[place] = (tick if since is None else since) if is_up else None
            if is_up:
                best = min(best, self.effective_usd(place, tick))
        self._order.append(best)
        insort(self._prices, best)
        if len(self._order) > KEPT_PRICES_MAX:
            self._prices.remove(self._order.pop(0))
        self.seen = tick

    def life_s(self, place: int, tick: int, most_s: float) -> float:
        since = self._since[place]
        age = 0.0 if since is None else (tick - since) * self._series.tick_s
        table, now_h = self._tables[place], tick * self._series.tick_s / HOUR_S
        rates = table.rates_per_hour()
        recent = [now_h - at for at in self._lost_at_h[place]]
        ratio = volatility(recent, expected_per_hour=min(rates[0], 0.5))
        return table.life_s(age, volatility=ratio, most_s=most_s)

    def effective_usd(self, place: int, tick: int) -> float:
        """The price of an hour of work in a place, a start included."""
        life_s = self.life_s(place, tick, 24 * HOUR_S)
        useful = max(life_s - self._job.start_s, 0.05 * life_s)
        return self._series.usd_per_hour[place][tick] * life_s / useful

    def had(self) -> tuple[PriceHad, ...]:
        """At most twenty prices."""
        total = len(self._prices)
        found: dict[float, float] = {}
        for twentieth in range(1, 21):
            at = max(0, (total * twentieth) // 20 - 1)
            price = self._prices[at]
            if price < inf:
                found[price] = max(found.get(price, 0.0), (at + 1) / total)
        return tuple(PriceHad(price, share, self._gap_s(price)) for price, share in sorted(found.items()))

    def _gap_s(self, price: float) -> float:
        """The mean length of the times in which this price was not enough; the last one may go on yet."""
        gaps, without, was_enough = 0, 0, True
        for best in self._order:
            is_enough = best <= price
            without += not is_enough
            gaps += was_enough and not is_enough
            was_enough = is_enough
        return self._series.tick_s * without / gaps if gaps else 0.0


def replay(series: PlaceSeries, job: DeadlineJob, policy: Policy, *, begin: int, knobs: PolicyKnobs) -> DeadlineRun:
    """Runs the job from tick `begin` on; the ticks before it are what the service has watched."""
    watch = Watch(series, job)
    for tick in range(begin):
        watch.see(tick)
    return _Replay(series, job, policy, watch, knobs).run(begin)


class _Replay:
    """One run: where the job and its state are, what is done, what it has cost."""

    def __init__(self, series: PlaceSeries, job: DeadlineJob, policy: Policy, watch: Watch, knobs: PolicyKnobs) -> None:
        self._series, self._job, self._policy, self._watch = series, job, policy, watch
        self._moves, self._number = job.moves_of(series), {name: at for at, name in enumerate(series.places)}
        self._number[ON_DEMAND] = len(series.places)
        self._knobs = replace(
            knobs,
            start_s=job.start_s,
            rescue_s=self._moves.seconds_to(self._number[ON_DEMAND]),
            spares_max=0,
            decides_every_s=series.tick_s,
        )
        self._at: str | None = None
        self._state_at: str | None = None
        self._moving_s = self._cold_s = self._served_s = 0.0
        self._done_s = self._usd = 0.0
        self._moved = 0
        self._ledger: list[SpentRow] = []

    def run(self, begin: int) -> DeadlineRun:
        series, job = self._series, self._job
        for tick in range(begin, series.ticks):
            elapsed = (tick - begin) * series.tick_s
            if elapsed >= job.deadline_s:
                break
            self._watch.see(tick)
            self._lose(tick)
            self._go(self._wanted(tick, elapsed), elapsed)
            done_in = self._spend(tick, elapsed, min(series.tick_s, job.deadline_s - elapsed))
            if done_in is not None:
                return self._result(elapsed + done_in)
        return self._result(inf)

    def _lose(self, tick: int) -> None:
        if self._at is None or self._at == ON_DEMAND:
            return
        if self._series.offered[self._number[self._at]][tick] < self._job.gang:
            self._at = None

    def _wanted(self, tick: int, elapsed: float) -> str | None:
        decision = self._policy.decide(self._inputs(tick, elapsed))
        if decision.verdict is PolicyVerdict.PAUSE or decision.option is None:
            return None
        # A place is gone to at once: what is paid for there starts the job.
        return next((pool for pool, _ in decision.hold if pool != self._at), decision.option.place)

    def _inputs(self, tick: int, elapsed: float) -> PolicyInputs:
        series, job = self._series, self._job
        left_s = job.work_s - self._done_s
        pools = [
            self._pool(place, Market.SPOT, series.usd_per_hour[index][tick], self._watch.life_s(index, tick, 86_400.0))
            for index, place in enumerate(series.places)
            if series.offered[index][tick] >= job.gang
        ]
        pools.append(self._pool(ON_DEMAND, Market.ON_DEMAND, series.on_demand_usd_per_hour, inf))
        standing = None
        if self._at is not None:
            starting_s = self._moving_s + self._cold_s
            standing = StandingWorld(GANG, 1, self._at, ((self._at, 1),), starting_s=starting_s)
        return PolicyInputs(
            pools=tuple(pools),
            candidates=(Candidate(GANG, 1, 1.0, 1, is_measured=True, change_s=job.start_s),),
            usd_per_hour_on_demand=series.on_demand_usd_per_hour,
            had=self._watch.had(),
            standing=standing,
            served_s=self._served_s,
            goal=Goal(
                tokens_left=left_s,
                tokens_done=self._done_s,
                elapsed_s=elapsed,
                deadline_in_s=job.deadline_s - elapsed,
            ),
            knobs=replace(self._knobs, horizon_max_s=max(self._knobs.horizon_min_s, left_s + job.start_s)),
        )

    def _pool(self, place: str, market: Market, usd: float, life_s: float) -> PoolView:
        here, (moved_usd, moved_s) = int(self._at == place), self._move_to(place)
        return PoolView(
            place, place, market, usd, held=here, offered=1 - here, life_s=life_s, move_usd=moved_usd, move_s=moved_s
        )

    def _move_to(self, place: str) -> tuple[float, float]:
        """Dollars and seconds until the state is there; a job that has not begun has none."""
        if self._state_at is None:
            return 0.0, 0.0
        source, target = self._number[self._state_at], self._number[place]
        return self._moves.usd[source][target], self._moves.seconds[source][target]

    def _go(self, place: str | None, elapsed: float) -> None:
        if place == self._at:
            return
        if place is not None:
            usd, self._moving_s = self._move_to(place)
            self._moved += 1
            self._cold_s, self._served_s = self._job.start_s, 0.0
            if usd:
                self._usd += usd
                self._ledger.append(SpentRow(SpentOn.EGRESS, place, elapsed, elapsed, usd))
            self._state_at = place
        self._at = place

    def _spend(self, tick: int, elapsed: float, span_s: float) -> float | None:
        """One tick; when in it the work was done, if it was."""
        if self._at is None:
            self._note(SpentOn.IDLE, elapsed, elapsed + span_s, 0.0)
            return None
        series = self._series
        usd = series.on_demand_usd_per_hour
        if self._at != ON_DEMAND:
            usd = series.usd_per_hour[self._number[self._at]][tick]
        moves_s = min(span_s, self._moving_s)
        starts_s = min(span_s - moves_s, self._cold_s)
        works_s = span_s - moves_s - starts_s
        left_s = self._job.work_s - self._done_s
        is_done = works_s >= left_s - NEVER_MOVES
        works_s = min(works_s, left_s)
        used_s = moves_s + starts_s + works_s if is_done else span_s
        at_s = elapsed
        for what, seconds in ((SpentOn.MOVING, moves_s), (SpentOn.START, starts_s), (SpentOn.WORK, works_s)):
            if seconds > 0:
                self._note(what, at_s, at_s + seconds, usd * seconds / HOUR_S)
                at_s += seconds
        self._usd += usd * used_s / HOUR_S
        self._done_s += works_s
        self._moving_s -= moves_s
        self._cold_s -= starts_s
        self._served_s += used_s
        return used_s if is_done else None

    def _note(self, what: SpentOn, begin_s: float, end_s: float, usd: float) -> None:
        place, last = self._at or "", self._ledger[-1] if self._ledger else None
        if last is not None and (last.what, last.place) == (what, place) and last.end_s == begin_s:
            self._ledger[-1] = replace(last, end_s=end_s, usd=last.usd + usd)
        else:
            self._ledger.append(SpentRow(what, place, begin_s, end_s, usd))

    def _result(self, done_at_s: float) -> DeadlineRun:
        spent: dict[str, float] = {}
        for row in self._ledger:
            spent[row.place] = spent.get(row.place, 0.0) + row.end_s - row.begin_s
        idle_s = spent.pop("", 0.0)
        return DeadlineRun(
            usd=self._usd,
            done_at_s=done_at_s,
            moves=self._moved,
            on_demand_s=spent.get(ON_DEMAND, 0.0),
            idle_s=idle_s,
            places=tuple(sorted(spent.items(), key=lambda item: -item[1])),
            ledger=tuple(self._ledger),
        )
