"""Caches objects made from stored JSON, so that the same JSON is not validated again at every read. Pure."""

import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Parsed(Generic[T]):
    """A bounded cache of one kind of immutable object.

    A cached object is used only if the JSON just read equals the JSON it was made from. So it is never older than the
    row, in any replica, and a write of another transaction is seen at once.
    """

    def __init__(self, make: Callable[[Any], T], *, most: int) -> None:
        self._make = make
        self._most = most
        self._kept: dict[Hashable, tuple[Any, T]] = {}
        self._lock = threading.Lock()

    def of(self, key: Hashable, stored: Any) -> T:
        """The object made from `stored`. `key` names the row; it need only make equal content likely."""
        kept = self._kept.get(key)
        if kept is not None and kept[0] == stored:
            return kept[1]
        made = self._make(stored)
        with self._lock:
            if key not in self._kept and len(self._kept) >= self._most:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = (stored, made)
        return made
