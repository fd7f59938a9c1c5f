"""The layouts that a replay of a job chooses among."""

from liver_core.layout.parallel import ParallelLayout
from service.planner.change_cost import shipped_cost
from service.simulation.job_layouts import candidates_of
from tests.service.planner.test_decision import JOB, job


def test_experts_stay_cut_as_in_the_layouts_that_ran():
    spec = job(layouts={}, model=JOB["model"] | {"num_experts": 8}, nodes={"min": 1, "max": 4})
    for measured, cuts in (
        ((), {1}),
        ((("TP1xPP1xDP4xEP4", 2.0), ("TP2xPP1xDP2xEP4xETP1", 1.0)), {4}),
    ):
        found = candidates_of(spec, slots_per_node=4, device="", cost=shipped_cost(), measured=measured)
        layouts = [ParallelLayout.parse(each.layout) for each in found]
        assert {layout.ep for layout in layouts} == cuts
        assert all(layout.expert_tp == 1 for layout in layouts if layout.ep > 1)
