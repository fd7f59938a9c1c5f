"""A policy that does not weigh the same inputs twice: for many replays of traces that resemble each other. Pure."""

from functools import lru_cache

from service.policy.types import Policy, PolicyDecision, PolicyInputs

DECISIONS_KEPT_MAX = 20_000
"""Some 5 kB each."""


class RememberingPolicy:
    """Decides as `policy` does. A decision depends on its inputs alone, so that the one of equal inputs is the same."""

    def __init__(self, policy: Policy, *, kept_max: int = DECISIONS_KEPT_MAX) -> None:
        self.name = policy.name
        self._decide = lru_cache(maxsize=kept_max)(policy.decide)

    def decide(self, inputs: PolicyInputs) -> PolicyDecision:
        return self._decide(inputs)
