"""Handoffs with experts that fail, drop a step, do it again or rescue, with a bias that each step changes: its version
shows in no certificate of masters and moments.

DP2xEP2 on a and b goes to DP2 on b and a newcomer, which has one optimizer where the old world has two. What goes on is
compared with a job left alone where the old world stays, and with a restart in the layout of the target where not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from liver_core.handoff.messages import Rung
from liver_core.layout import Member
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks_process import Fault
from tests.liver_core.rank.cutover.test_experts import BIAS, LATE, LOSSES, moe, train_alone
from tests.liver_core.rank.support.amended import AmendedJob
from tests.liver_core.rank.support.chain import World, gather
from tests.liver_core.rank.support.drops import hold_at, permit_held, prepare_within_a_step
from tests.liver_core.rank.support.stream_random import Story
from tests.liver_core.rank.support.stream_trio import STREAM
from tests.liver_core.rank.support.trio import (
    LEAVER,
    SHORT,
    SURVIVOR,
    Trio,
    assert_trained_as_if_nothing_had_happened,
    trio_setup,
)

pytestmark = [pytest.mark.thorough, pytest.mark.real, pytest.mark.timeout(180)]

SOURCE, TARGET = "DP2xEP2", "DP2"
STEPS_AFTER = 3


class ExpertTrio(Trio):
    """As Trio, with experts, and by the rung that is set."""

    rung = Rung.LIVE

    def open(self, *arguments: Any, **named: Any) -> Any:
        return super().open(*arguments, **{"rung": self.rung, **named})

    def switches(self, request: Any, newcomer: Member) -> int:
        """Wait until the next world trains. Returns the last step that the old world applied."""
        members = [SURVIVOR, newcomer]
        self.await_stage(members, request, "active", 40)
        self.command(self.members(request), "retire", request.handoff_id)
        self.roster = request.target
        generation = request.generation
        before = max(step for seen, step, *_ in self.steps(SURVIVOR) if seen < generation)
        self.await_step(SURVIVOR, before + STEPS_AFTER + 2)
        return before


def setup_of(corpus: str, **changes: Any) -> RankSetup:
    # So many experts that some get about their share of the tokens: for them a part that is counted twice tells.
    arguments = moe(corpus, **BIAS, **LOSSES) | {"num_layers": 2, "num_experts": 16}
    return trio_setup(
        corpus,
        job_arguments=arguments,
        **{"pace_s": 0.2, "micro_batch": 1} | changes,
    )


@pytest.fixture
def job(corpus: str) -> Iterator[ExpertTrio]:
    with ExpertTrio(setup_of(corpus), SOURCE, TARGET) as trio:
        trio.begin()
        yield trio


def assert_goes_on_as_a_restart(job: ExpertTrio, newcomer: Member, step: int, folder: Path) -> None:
    """The old world alone up to `step`, then a restart of what it wrote in the layout of the target: every later step
    has the same bits on each rank."""
    traces = {member: result["trace"] for member, result in job.stop().items()}
    written = (str(folder / "alone"), step, 1_000)
    train_alone(job.setup, World(SOURCE, "ab"), "", step + 1, written)
    alone = train_alone(job.setup, World(TARGET, "bc"), f"{written[0]}/step-{step:09d}", step + STEPS_AFTER + 1, None)
    for member, node in ((SURVIVOR, "b"), (newcomer, "c")):
        for number in range(step, step + STEPS_AFTER + 1):
            assert traces[member][number][1] == alone.traces[node][number][1], (member, number)


def test_a_source_that_dies_between_boundary_and_vote_costs_one_batch_that_is_done_with_the_bias_before_it(
    job: ExpertTrio, tmp_path: Path
):
    job.arm(LEAVER, "norm", "hold")
    job.arm(SURVIVOR, "state read", "tell")
    request, newcomer = job.ready(Fault("state read", "tell"), cutover=SHORT)
    job.permit(request)
    job.await_passage(LEAVER, "norm")
    for member in (SURVIVOR, newcomer):
        job.await_passage(member, "state read")
    stands = job.steps(SURVIVOR)[-1][1]
    job.kill(LEAVER)
    assert job.switches(request, newcomer) == stands
    assert_goes_on_as_a_restart(job, newcomer, stands, tmp_path)


def test_a_dropped_step_is_done_again_with_the_bias_before_it(corpus: str, tmp_path: Path):
    setup = setup_of(corpus, global_batch=8, drop_every=1, stream={"tile_elements": 4096})
    with ExpertTrio(setup, SOURCE, TARGET) as job:
        job.rung = Rung.DROP_STEP
        job.begin()
        request, newcomer = job.ready()
        hold_at(job, LEAVER, 2)
        permit_held(job, request)
        stands = job.switches(request, newcomer)
        assert_goes_on_as_a_restart(job, newcomer, stands, tmp_path)


def test_a_step_dropped_on_the_way_to_stages_of_which_one_has_no_experts_is_done_again_there(
    corpus: str, tmp_path: Path
):
    """In parts, whose auxiliary losses weigh as in the whole step."""
    worlds = World("DP2xEP2", "ab"), World("PP2xDP2xEP2", "cbad")
    setup = RankSetup(
        moe(corpus, **BIAS, **LOSSES, **LATE),
        global_batch=12,
        micro_batch=1,
        trace=True,
        drop_every=1,
        stream={"tile_elements": 4096},
    )
    with Cluster(setup) as cluster:
        cluster.launch(worlds[0].layout, worlds[0].nodes)
        cluster.await_step(worlds[0].first, 2)
        request = prepare_within_a_step(cluster, worlds[1].layout, worlds[1].nodes)
        permit_held(cluster, request)
        cluster.await_stage(request.target.members, request, "active", 40)
        cluster.command(cluster.members(request), "retire", request.handoff_id)
        cluster.roster = request.target
        stands = max(step for seen, step, *_ in cluster.steps(worlds[0].first) if seen < request.generation)
        cluster.await_step(worlds[1].first, stands + STEPS_AFTER + 2)
        cluster.stop()
        chain = gather(cluster, worlds)
    written = (str(tmp_path / "alone"), stands, 1_000)
    train_alone(setup, worlds[0], "", stands + 1, written)
    alone = train_alone(setup, worlds[1], f"{written[0]}/step-{stands:09d}", stands + STEPS_AFTER + 1, None)
    for node in worlds[1].nodes:
        for step in range(stands, stands + STEPS_AFTER + 1):
            assert chain.traces[node][step][1] == alone.traces[node][step][1], (node, step)


def test_a_rescue_goes_on_with_the_bias_before_the_step_that_was_under_way(job: ExpertTrio, tmp_path: Path):
    job.rung = Rung.RESCUE
    request, newcomer = job.ready()
    job.permit(request)
    stands = job.switches(request, newcomer)
    assert_goes_on_as_a_restart(job, newcomer, stands, tmp_path)


@pytest.mark.parametrize("rung", [Rung.LIVE, Rung.STOP_AND_COPY, Rung.DROP_STEP, Rung.RESCUE])
def test_after_no_go_the_old_world_goes_on_as_if_nothing_had_happened(corpus: str, tmp_path: Path, rung: Rung):
    """Refused after a complete boundary, and after a drop: its step is applied, or done again from its start."""
    drops = {"global_batch": 8, "drop_every": 1, "stream": {"tile_elements": 4096}} if rung is Rung.DROP_STEP else {}
    with ExpertTrio(setup_of(corpus, **drops), SOURCE, TARGET) as job:
        job.rung = rung
        job.begin()
        if rung is Rung.RESCUE:
            job.arm(SURVIVOR, "state read", "corrupt share")
            request, newcomer = job.ready()
        elif rung is Rung.DROP_STEP:
            request, newcomer = job.ready(Fault("state read", "corrupt counts"))
        else:
            request, newcomer = job.ready(Fault("gradients read", "corrupt gradients"))
        if rung is Rung.DROP_STEP:
            hold_at(job, LEAVER, 2)
            permit_held(job, request)
        else:
            job.permit(request)
        for member in (LEAVER, SURVIVOR, newcomer):
            assert job.reason(member, request, "aborted")
        job.trains_on()
        assert_trained_as_if_nothing_had_happened(job)


def test_of_an_amended_plan_the_newest_target_gets_experts_and_bias(corpus: str):
    """Amended while state streams, then while models are built, with another number of optimizers each time."""
    stream = {**STREAM, "tile_elements": 1 << 12}
    with AmendedJob(RankSetup(moe(corpus, **BIAS), trace=True, pace_s=0.2, stream=stream)) as job:
        job.begin(SOURCE, "ab")
        job.arm(Member("a", 0), "middle tile", "hold")
        first = job.live("DP4xEP4", "acde")
        job.await_passage(Member("a", 0), "middle tile")
        newer = job.amend(first, "TP1", "a")
        job.let_go(Member("a", 0), "middle tile")
        job.ends_in(newer, "TP1", "a")
        job.arm(Member("a", 0), "build_model", "hold")
        first = job.live(TARGET, "af")
        job.await_passage(Member("a", 0), "build_model")
        newer = job.amend(first, SOURCE, "fa")
        job.let_go(Member("a", 0), "build_model")
        job.ends_in(newer, SOURCE, "fa")
        job.held_what_stop_and_copy_gives(Story(0, "adam", "fp32", 2, ()))


def test_a_bias_that_arrives_damaged_is_refused_by_name(job: ExpertTrio):
    for rung in (Rung.STOP_AND_COPY, Rung.LIVE):
        job.rung = rung
        request, newcomer = job.ready(Fault("state read", "corrupt bias"))
        job.permit(request)
        said = job.reason(newcomer, request, "aborted")
        assert ("router.expert_bias" if rung is Rung.STOP_AND_COPY else "or step counts") in said, said
        job.trains_on()
    assert_trained_as_if_nothing_had_happened(job)
