"""What NIXL's backends differ in, for an endpoint that reads over one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from liver_core.transport.regions import Address

PROGRESS_PERIOD_S, CALM_PERIOD_S = 0.002, 0.02
"""A source rests at least so long between two polls: while peers connect, and once all are connected."""


class Profile(Protocol):
    """`Ucx` or `Efa`."""

    kind: ClassVar[str]
    """Of the addresses of its endpoints."""
    backend: ClassVar[str]
    """NIXL's name for it."""

    def environment(self) -> Mapping[str, str]:
        """What must be in the environment before the process makes its first agent."""
        ...

    def check_here(self) -> None:
        """Raise TransportError, with the remedy, where this process cannot use it. Comes before the first agent."""
        ...

    def extra(self) -> Mapping[str, Any]:
        """What addresses say for `check_peer` at the other end: JSON values."""
        ...

    def check_peer(self, peer: int, address: Address) -> None:
        """Raise TransportError for a peer that cannot be read one-sidedly, as far as its address tells."""
        ...

    def prove(self, peer: int, read: Callable[[], None], deadline: float) -> None:
        """Wire up by reads of the peer's token (each call of `read` is one), and raise TransportError where those need
        its help: WayLost where one may never end."""
        ...
