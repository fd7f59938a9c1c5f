"""How one job steps, as this node knows it: by its own ranks, or else by what the agents of members tell."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping

from agent.driver.planning import Pulse
from agent.supervisor.watchdog import RankPulse
from liver_core.handoff.messages import PreparePhase
from liver_core.layout import Roster

BUILDING = (PreparePhase.BUILD_MODEL, PreparePhase.LAY_OUT_STATE)
"""What a rank does alone, whoever else comes late."""


class Pace:
    """As node `own` knows it. `pulses`: of the job's ranks here. `ask` gives the usual seconds of a step by what these
    nodes tell, 0 where none does, within a bounded time. `look_again`: what waited for that can be decided now."""

    def __init__(
        self,
        own: str,
        *,
        pulses: Callable[[], Collection[RankPulse]],
        ask: Callable[[Collection[str]], Awaitable[float]],
        look_again: Callable[[], None],
    ) -> None:
        self._own = own
        self._pulses = pulses
        self._ask = ask
        self._look_again = look_again
        self._told_s = 0.0
        self._told_of = 0  # the generation of which somebody has told, or nobody could
        self._asking: asyncio.Task[None] | None = None
        self._saved: tuple[int | None, float | None] = (None, None)  # step and seconds of the newest checkpoint
        self._build_s = 0.0

    def take_checkpoint(self, step: int, seconds: float | None) -> None:
        """A rank of this node has reported a checkpoint."""
        self._saved = step, seconds

    def take_measures(self, measures: Mapping[str, float]) -> None:
        """A rank of this node has measured these. Where it has built a world, a start too, the next takes as long."""
        built = [measures[f"{phase}_s"] for phase in BUILDING if f"{phase}_s" in measures]
        self._build_s = sum(built) or self._build_s

    def take(self, step_s: float, generation: int) -> None:
        """Another agent tells the seconds of a step of this generation; 0: it does not know either."""
        if step_s > 0:
            self._told_s, self._told_of = step_s, max(self._told_of, generation)

    def pulse(self) -> Pulse:
        """What is known now. Seconds of a step that are not known are 0."""
        stepped = [pulse for pulse in self._pulses() if pulse.seconds]
        if not stepped:
            return Pulse(0, 0.0, self._told_s, *self._saved, build_s=self._build_s)
        last, slowest = max(stepped, key=lambda pulse: pulse.step), max(stepped, key=RankPulse.median_s)
        age_s = last.step_age_s(time.monotonic())
        return Pulse(last.step, age_s, slowest.median_s(), *self._saved, slowest.deviation_s(), self._build_s)

    def is_known(self, world: Roster) -> bool:
        """Whether the seconds of a step of `world` are known here. False while its members are being asked; where none
        of them tells, this counts as known, so that nothing waits for it any longer."""
        if self.knows(world):
            return True
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_members(world))
        return False

    def knows(self, world: Roster) -> bool:
        """The same, but nobody is asked."""
        return self._told_of >= world.generation or any(pulse.seconds for pulse in self._pulses())

    async def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask_members(self, world: Roster) -> None:
        others = [name for name in world.node_ids() if name != self._own]
        self.take(await self._ask(others), world.generation)
        self._told_of = max(self._told_of, world.generation)
        self._look_again()
