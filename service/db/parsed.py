"""Objects made from stored JSON, kept so that the same JSON is not validated anew at every read. Pure."""

import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Parsed(Generic[T]):
    """A bounded memory of one kind of immutable object.

    A kept object is used only where the JSON just read equals the one it was made from: it is never older than the row,
    in whichever replica, and what another transaction wrote is seen at once.
    """

    def __init__(self, make: Callable[[Any], T], *, most: int) -> None:
        self._make = make
        self._most = most
        self._kept: dict[Hashable, tuple[Any, T]] = {}
        self._lock = threading.Lock()

    def of(self, key: Hashable, stored: Any) -> T:
        """The object of `stored`. `key` names the row; it only has to make equal content likely."""
        kept = self._kept.get(key)
        if kept is not None and kept[0] == stored:
            return kept[1]
        made = self._make(stored)
        with self._lock:
            if key not in self._kept and len(self._kept) >= self._most:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = (stored, made)
        return made
