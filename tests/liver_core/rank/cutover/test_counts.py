"""Handoffs of jobs whose optimizers count otherwise than torch's Adam: in the parameter group, or not at all.

In the same layout nothing but places changes: a count or a momentum that is lost shows in the bits of the next step.
"""

from __future__ import annotations

import pytest

from liver_core.handoff.messages import Rung
from tests.cluster.rank_cluster import RankSetup
from tests.cluster.real_ranks_model import small_gpt
from tests.liver_core.rank.support.chain import World, run_chain
from tests.liver_core.rank.support.job_names import JOBS
from tests.liver_core.rank.support.undisturbed_runs import run_undisturbed
from tests.tiers import sample

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

WORLDS = (World("DP2", "ab"), World("DP2", "cb"), World("DP2", "bd"))


@pytest.mark.parametrize("job", sample(["counts in the group", "sgd", "lion"], "counts in the group"), ids=str)
def test_every_step_after_a_handoff_is_bit_for_bit_that_of_a_job_left_alone(corpus: str, job: str):
    setup = RankSetup(small_gpt(corpus, num_layers=2), job=JOBS[job], trace=True, record=True, pace_s=0.3)
    chain = run_chain(setup, WORLDS, rung=(Rung.LIVE, Rung.STOP_AND_COPY), steps_each=2, steps_last=2)
    alone = run_undisturbed(setup, "DP2", chain.steps[-1][1])
    ours = {
        (WORLDS[generation - 1].nodes.index(node), step): digest
        for node, trace in chain.traces.items()
        for step, (generation, digest) in trace.items()
    }
    expected = {
        ("ab".index(node), step): bits for node, trace in alone.traces.items() for step, (_, bits) in trace.items()
    }
    assert expected.keys() <= ours.keys() and len(expected) > 2 * 6
    assert [place for place, digest in sorted(expected.items()) if ours[place] != digest] == []
    assert any(said.get("bytes_streamed", 0.0) for said in chain.measures[2]), "the first handoff was not live"
