"""What is kept of handoffs that were led here."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent.driver import mirrors as mirrors_module
from agent.driver.mirrors import COSTS_MAX, Mirrors
from liver_core.handoff import CostParts, MeasuredCost, Rung


def test_of_very_many_handoffs_the_newest_costs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrors_module, "cost_of", lambda mirror: mirror.cost)
    kept = Mirrors(cast(Any, SimpleNamespace()))
    for number in range(COSTS_MAX + 1):
        rung = Rung.LIVE if number else Rung.STOP_AND_COPY
        cost = MeasuredCost(rung, CostParts(float(number), 0.0, 0.0, 0.0))
        kept._learn(cast(Any, SimpleNamespace(handoff_id=number, cost=cost)))
    assert {each.rung for each in kept.costs} == {Rung.LIVE}, "the oldest is forgotten"
    assert kept.costs[-1].parts.building_s == COSTS_MAX
