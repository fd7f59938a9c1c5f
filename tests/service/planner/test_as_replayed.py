"""The service decides as a replay does: each question that a replay asks is put to the service too, as nodes, world."""

from collections import Counter
from dataclasses import replace
from math import inf

from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent.protocol.jobfile import JobFile
from liver_core.layout import Member
from liver_core.layout.parallel import ParallelLayout
from service.planner.change_cost import shipped_cost
from service.planner.decision import decide
from service.planner.inputs import LayoutUse, PlanInputs, PlannerVerdict, PlanNode, PoolMarket, World
from service.policy.choosing import UtilityPolicy
from service.policy.types import Goal, PolicyDecision, PolicyInputs, PolicyKnobs, PolicyVerdict
from service.simulation.cluster_replay import replay_cluster
from service.simulation.job_layouts import candidates_of
from service.simulation.replay_setup import ReplaySetup
from service.simulation.traces import of_counts
from tests.service.planner.test_decision import job
from tests.service.planner.test_worth import TOKENS

STEPS = {2: 1.0, 3: 0.8, 4: 0.6, 6: 0.5}
MEASURED = tuple((f"TP1xPP{nodes}xDP1", step_s) for nodes, step_s in STEPS.items())
ON_DEMAND_USD = 3.0


def rules(worth: float | None, spares_max: int, acquire_s: float) -> JobFile:
    policy = {"spares_max": spares_max, "acquire_s": acquire_s, "gain_min": 0.02, "on_demand": False}
    if worth is not None:
        policy["usd_per_mtok"] = worth
    allowed = [f"PP{nodes}" for nodes in STEPS]
    return job(nodes={"min": 2, "max": 6}, layouts={"allowed": allowed}, policy=policy)


def as_the_service_sees_it(spec: JobFile, asked: PolicyInputs) -> PlanInputs:
    """One pool of nodes with one slot; members come first, and of a world that lost nodes those are gone."""
    pool, standing, world, members = asked.pools[0], asked.standing, None, ()
    if standing is not None:
        stay = sum(count for _, count in standing.use)
        members = tuple(f"n{at}" if at < stay else f"gone{at}" for at in range(standing.nodes))
        world = World(1, ParallelLayout.parse(standing.layout), tuple(Member(name, 0) for name in members))
    market = PoolMarket(
        pool.pool,
        pool.usd_per_hour,
        asked.usd_per_hour_on_demand,
        life_s=pool.life_s,
        group_sizes=pool.group_sizes,
        offered=pool.offered + pool.coming,
        ours=pool.at_risk,
    )
    nodes = tuple(PlanNode(f"n{at}", 1, pool=pool.pool, usd_per_hour=pool.usd_per_hour) for at in range(pool.held))
    # A job whose steps were measured has run, and what it ran on says what its nodes are like.
    return PlanInputs(
        spec, nodes, world, step_seconds=MEASURED, history=(LayoutUse(2, "TP1xPP2xDP1"),), markets=(market,)
    )


class AskedTwice:
    """Decides for the replay, and requires the service's decision to be the same."""

    name = "liver"

    def __init__(self, spec: JobFile) -> None:
        self.spec, self.spares = spec, 0
        self.compared: Counter[PolicyVerdict] = Counter()

    def decide(self, inputs: PolicyInputs) -> PolicyDecision:
        # What a pool will offer is not known in the service.
        inputs = replace(inputs, pools=tuple(replace(pool, grows_in_s=inf) for pool in inputs.pools))
        made = UtilityPolicy().decide(inputs)
        facts = as_the_service_sees_it(self.spec, inputs)
        found = decide(facts)
        assert decide(facts) == found
        if made.option is not None and made.option.layout and made.verdict is not PolicyVerdict.PAUSE:
            assert found.wanted is not None and found.wanted.layout == (made.best or made.option).layout
            assert {each.pool: each.hold for each in found.wanted.pools} == {"spot": 0} | dict(made.hold)
            is_up = made.option.nodes <= inputs.pools[0].held
            if is_up and made.verdict is PolicyVerdict.STAY:
                assert found.verdict is PlannerVerdict.STAY, (made.reason, found.reason)
            elif is_up:
                assert found.target is not None, (made.reason, found.reason)
                assert (str(found.target.layout), len(found.target.node_ids())) == (
                    made.option.layout,
                    made.option.nodes,
                )
            self.compared[made.verdict] += is_up
            self.spares = max(self.spares, found.wanted.spares)
        return made


def replayed(
    counts: list[int], *, every_s: float, worth: float | None, spares_max: int, acquire_s: float
) -> AskedTwice:
    """`worth`: of a million tokens, as a multiple of what they cost on two nodes."""
    dollars = None if worth is None else worth * 2 / (3_600 / STEPS[2] * TOKENS) * 1e6
    spec = rules(dollars, spares_max, acquire_s)
    assert spec.policy is not None
    trace = of_counts("drawn", [(at * every_s, count) for at, count in enumerate(counts)], len(counts) * every_s)
    both = AskedTwice(spec)
    replay_cluster(
        trace,
        candidates_of(spec, slots_per_node=1, device="", cost=shipped_cost(), measured=MEASURED),
        both,
        setup=ReplaySetup(usd_per_hour_on_demand=ON_DEMAND_USD, notice_s=30.0, acquire_s=acquire_s),
        knobs=PolicyKnobs(gain_min=spec.policy.gain_min, spares_max=spares_max, on_demand=False),
        goal=Goal(usd_per_mtok=dollars),
    )
    return both


@settings(deadline=None, max_examples=40)
@example(counts=[4, 0, 5, 8], every_s=600.0, worth=None, spares_max=1, acquire_s=900.0)
@given(
    counts=st.lists(st.integers(0, 8), min_size=3, max_size=12),
    every_s=st.sampled_from([60.0, 600.0]),
    worth=st.none() | st.floats(0.2, 20.0),
    spares_max=st.integers(0, 3),
    acquire_s=st.sampled_from([0.0, 120.0, 900.0]),
)
def test_every_decision_of_a_replay_is_the_services_own_for_the_same_facts(
    counts, every_s, worth, spares_max, acquire_s
):
    replayed(counts, every_s=every_s, worth=worth, spares_max=spares_max, acquire_s=acquire_s)


def test_starts_moves_stays_and_spares_are_among_what_was_compared():
    both = replayed([8, 7, 8, 6, 8, 5, 8, 2, 4, 8, 7], every_s=60.0, worth=20.0, spares_max=3, acquire_s=900.0)
    assert {PolicyVerdict.START, PolicyVerdict.MOVE, PolicyVerdict.STAY} <= set(both.compared)
    assert both.spares >= 1
