"""How long nodes are kept that are not wanted any more: what is given back takes time to come again. Pure."""

from collections import deque


class LatelyWanted:
    """The most nodes that were wanted in the last `keeps_s`. Losses come in bursts: a node given back in the middle of
    one is bought again minutes later, while the job runs on fewer."""

    def __init__(self, keeps_s: float) -> None:
        self._keeps_s = keeps_s
        self._wanted: deque[tuple[float, int]] = deque()

    def count(self, at_s: float, wanted: int) -> int:
        """With what is wanted now; times do not go back. 0 forgets what was: whoever wants nothing keeps nothing."""
        if not wanted:
            self._wanted.clear()
        while self._wanted and self._wanted[0][0] < at_s - self._keeps_s:
            self._wanted.popleft()
        # Whatever was wanted before and is no more than this can never be the most again.
        while self._wanted and self._wanted[-1][1] <= wanted:
            self._wanted.pop()
        self._wanted.append((at_s, wanted))
        return self._wanted[0][1]
