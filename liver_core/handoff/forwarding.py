"""Whom the node that will go tells of it, and when again. Pure."""

from collections.abc import Iterable

from liver_core.handoff.leader_events import Forwarded, ForwardNotices, TellWithdrawal

FORWARD_AGAIN_S, FORWARD_PATIENCE_S = 2.0, 5.0
"""How soon a notice is forwarded again, and how long one candidate is given to make something of it."""


class Forwarding:
    """Of one node. One candidate after the other is told, and all of them anew when none is left."""

    def __init__(self) -> None:
        self._began_at = self._again_at = float("-inf")
        self._is_telling = False
        self._skip: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self._heard_of_us: set[str] = set()

    def take_news(self) -> None:
        """News is told at once."""
        self._again_at = float("-inf")

    def begin_anew(self) -> None:
        """A handoff has ended: that a candidate made nothing of a notice while it was open says nothing of it."""
        self._told.clear()
        self.take_news()

    def tell(self, candidates: tuple[str, ...], about: Iterable[str], now: float) -> tuple[ForwardNotices, ...]:
        """What is to be told now, if anything is; `candidates`: first choice first."""
        if self._is_telling or now < self._again_at:
            return ()
        self._began_at, self._again_at, self._is_telling = now, now + FORWARD_AGAIN_S, True
        ready = tuple(name for name in candidates if self._is_worth_telling(name, now))
        if not ready:
            self._skip.clear()
            self._told.clear()
        return (ForwardNotices(ready or candidates, frozenset(about)),)

    def take(self, event: Forwarded) -> None:
        """What became of it. Patience counts from when the telling began."""
        self._is_telling = False
        self._skip |= dict.fromkeys(event.missed, self._began_at + FORWARD_PATIENCE_S)
        if event.told:
            self._told.setdefault(event.told, self._began_at)
            self._heard_of_us.add(event.told)

    def take_withdrawal(self) -> tuple[TellWithdrawal, ...]:
        """This node stays. Who was told that it goes hears that from it; everybody else hears it from the service."""
        told = tuple(sorted(self._heard_of_us))
        self._heard_of_us.clear()
        self._told.clear()
        return (TellWithdrawal(told),) if told else ()

    def _is_worth_telling(self, name: str, now: float) -> bool:
        """Not if it was unreachable just now, nor if it was told a while ago and nothing came of it."""
        if self._skip.get(name, float("-inf")) > now:
            return False
        return now - self._told.get(name, now) <= FORWARD_PATIENCE_S
