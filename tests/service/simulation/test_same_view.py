"""What the simulated service is told of a job is what the real one reads from PostgreSQL, whatever happened."""

import pytest

from tests.service.simulation.drawn_facts import DrawnFacts
from tests.service.simulation.two_services import Drift, TwoServices, Undecided
from tests.tiers import sample

FACTS = 60
SEEDS = sample(range(200), 0, 1, 2, 3)


@pytest.mark.parametrize("seed", SEEDS)
def test_both_services_see_the_same_job_after_every_fact(seed: int, client, context, clock, make_agent) -> None:
    facts = DrawnFacts(TwoServices(client, context, clock, make_agent), clock, seed)
    try:
        facts.begin()
        for _ in range(FACTS):
            facts.happen()
    except Undecided:
        return  # From here on both may go either way.
    except Drift as drift:
        happened = "\n".join(facts.log)
        raise AssertionError(f"after\n{happened}\nthey differ:\n{drift}") from None
