"""Parts of a handoff between machines are killed, stopped, held up or cut off: who trains goes on, with the right bits.

`python -m tests.liver_core.rank.support.wire_strikes` plays as many as are wanted.
"""

from __future__ import annotations

import pytest

from tests.cluster.net_islands import why_not
from tests.liver_core.rank.support.wire_strikes import POINTS, VICTIMS, Trial, strike_of
from tests.tiers import sample

SEEDS = {str(seed): seed for seed in range(1, 21)}
TRIALS = 90


@pytest.mark.real
@pytest.mark.timeout(240)
@pytest.mark.skipif(bool(why := why_not()), reason=why)
@pytest.mark.parametrize("seed", sample(SEEDS, "6", "15"))
def test_nobody_who_trains_is_lost_and_no_torn_tile_is_taken(corpus: str, seed: str):
    verdict = Trial(strike_of(SEEDS[seed]), corpus).run()
    assert not verdict.wrong, verdict


def test_ninety_trials_meet_every_victim_in_every_way_and_every_point():
    strikes = [strike_of(seed) for seed in range(1, TRIALS + 1)]
    assert {(each.victim, each.how) for each in strikes} == {
        (who, how) for who, hows in VICTIMS.items() for how in hows
    }
    assert {each.point for each in strikes} == set(POINTS)
    assert len({each.form for each in strikes}) == 3
