"""A next world that the device has no room for waits in host memory, within two budgets, and never with other bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from liver_core.handoff.messages import Reason, Rung
from liver_core.layout import Manifest, Member
from tests.cluster.rank_cluster import Cluster, RankSetup
from tests.cluster.real_ranks_model import small_gpt
from tests.cluster.real_ranks_process import Fault
from tests.liver_core.rank.cutover.test_failures import assert_started_at_the_version_held
from tests.liver_core.rank.support.stream_random import (
    Link,
    Story,
    Told,
    first_difference,
    setup_of,
    told_by_stop_and_copy,
    told_live,
)
from tests.liver_core.rank.support.stream_trio import LiveTrio, live_setup
from tests.liver_core.rank.support.tight import manifest_of, tight
from tests.liver_core.rank.support.trio import (
    LEAVER,
    SHORT,
    SURVIVOR,
    assert_trained_as_if_nothing_had_happened,
)
from tests.liver_core.worlds.memory import resident
from tests.tiers import sample

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

PLENTY = 1 << 40
LINKS = (Link("PP2", ("a", "b"), {}, 2), Link("TP2", ("b", "c"), {}, 2, 2), Link("DP2", ("c", "b"), {}, 1))
PLACES = {2: {"b": (("PP2", 1), ("TP2", 0))}, 3: {"b": (("TP2", 0), ("DP2", 1)), "c": (("TP2", 1), ("DP2", 0))}}
"""Generation and survivor: (layout, rank) in the world before and in this one."""


def story_of(precision: str, bucket_size: int | None = None) -> Story:
    return Story(0, "adam", precision, 2, LINKS, bucket_size)


@cache
def manifest(corpus: str, precision: str, bucket_size: int | None) -> Manifest:
    return manifest_of(setup_of(story_of(precision, bucket_size), corpus))


def budgets(corpus: str, story: Story, *, streams: bool) -> tuple[int, int]:
    """The least that does for all survivors of the story."""
    made = manifest(corpus, story.precision, story.bucket_size)
    needs = [
        tight(made, source, target, streams=streams) for places in PLACES.values() for source, target in places.values()
    ]
    return max(device for device, _ in needs), max(host for _, host in needs)


@pytest.mark.parametrize(
    ("precision", "bucket_size"),
    sample([("fp32", None), ("bf16", None), ("fp32", 20_000), ("mixed", 20_000)], ("bf16", None)),
)
def test_a_device_with_room_for_one_tile_is_handed_over_live_bit_for_bit(
    corpus: str, precision: str, bucket_size: int | None
):
    story = story_of(precision, bucket_size)
    device, host = budgets(corpus, story, streams=True)
    setup = setup_of(story, corpus)
    live = told_live(story, replace(setup, extra_bytes_max=device, host_bytes_max=host))
    assert all(rung == Rung.LIVE for rung, _ in live.verdicts.values()), live.verdicts
    within(live, device, host)
    copied = told_by_stop_and_copy(story, setup, live.handed_at)
    assert not first_difference(live.traces, copied.traces)
    common = live.samples.keys() & copied.samples.keys()
    assert {step: live.samples[step] for step in common} == {step: copied.samples[step] for step in common}


def within(told: Told, device: int, host: int) -> None:
    """Every survivor kept both budgets, and had something in host memory."""
    for generation, places in PLACES.items():
        for node in places:
            said = told.measures[generation][node]
            assert said["extra_bytes_budget"] == device and said["host_bytes_budget"] >= host
            assert 0 < said["extra_bytes_peak"] <= device, said
            assert 0 < said["host_bytes_peak"] <= host, said
            assert said["swap_in_s"] > 0


@pytest.mark.thorough
def test_with_more_room_only_some_of_it_waits_in_host_memory(corpus: str):
    story = story_of("fp32")
    device, host = budgets(corpus, story, streams=True)
    setup, more = setup_of(story, corpus), device + 650_000
    live = told_live(story, replace(setup, extra_bytes_max=more, host_bytes_max=PLENTY))
    assert all(rung == Rung.LIVE for rung, _ in live.verdicts.values()), live.verdicts
    within(live, more, host // 2)  # two of four regions
    copied = told_by_stop_and_copy(story, setup, live.handed_at)
    assert not first_difference(live.traces, copied.traces)


@pytest.mark.thorough
@pytest.mark.parametrize(("precision", "bucket_size"), [("fp32", None), ("bf16", 20_000)])
def test_what_is_copied_in_the_pause_waits_in_host_memory_too(corpus: str, precision: str, bucket_size: int | None):
    story = story_of(precision, bucket_size)
    device, host = budgets(corpus, story, streams=False)
    setup, handed_at = setup_of(story, corpus), {2: 3, 3: 6}
    little = told_by_stop_and_copy(story, replace(setup, extra_bytes_max=device, host_bytes_max=host), handed_at)
    within(little, device, host)
    assert not first_difference(little.traces, told_by_stop_and_copy(story, setup, handed_at).traces), (
        "the budget changed the bits"
    )


# Whatever happens before GO, the old world stays as it was.


@pytest.fixture(scope="module")
def job(corpus: str) -> Iterator[LiveTrio]:
    setup = live_setup(corpus, job_arguments=small_gpt(corpus))
    device, host = trio_needs(corpus, streams=True)
    with LiveTrio(replace(setup, extra_bytes_max=device, host_bytes_max=host)) as trio:
        trio.begin()
        yield trio


def trio_needs(corpus: str, *, streams: bool) -> tuple[int, int]:
    return tight(manifest(corpus, "fp32", None), ("PP2", 1), ("TP2", 0), streams=streams)


@pytest.mark.parametrize(("short", "named"), [((1, 0), "extra_bytes_max"), ((0, 1), "host_bytes_max")])
def test_a_byte_too_few_is_refused_before_anything_is_built(
    corpus: str, job: LiveTrio, short: tuple[int, int], named: str
):
    """Where nobody streams; a stream that does not fit is given up first."""
    device, host = job.setup.extra_bytes_max, job.setup.host_bytes_max
    least, waiting = trio_needs(corpus, streams=False)
    assert device is not None and least < device and waiting <= host
    job.command([SURVIVOR], "set_budget", least - short[0], waiting - short[1])
    job.arm(SURVIVOR, "bring_up_groups", "tell")
    request = job.open("TP2", ["b", "d"], rung=Rung.STOP_AND_COPY)
    reason = job.reason(SURVIVOR, request, "aborted")
    assert reason.startswith("rank 0, estimate memory: PlacementRefused: " + named), reason
    needed = least if short[0] else waiting
    assert f"needs {needed} bytes" in reason and f"budget is {needed - 1}" in reason
    assert ("passed", "bring_up_groups") not in job.ranks[SURVIVOR].events
    job.aborted(request, "does not fit", LEAVER, request.target.members[1])
    job.command([SURVIVOR], "disarm")
    job.command([SURVIVOR], "set_budget", device, host)
    job.trains_on()


@pytest.mark.parametrize("point", sample(["lay_out_state", "middle tile", "hash target"], "lay_out_state"))
def test_it_is_aborted_while_state_waits_in_host_memory(job: LiveTrio, point: str):
    job.is_aborted_at(point)


@pytest.mark.parametrize("rung", sample([Rung.LIVE, Rung.STOP_AND_COPY], Rung.LIVE))
def test_no_go_after_the_boundary_leaves_the_old_world_training(corpus: str, job: LiveTrio, rung: Rung):
    job.newcomers += 1
    newcomer = Member(f"c{job.newcomers}", 0)
    job.faults[newcomer.node_id] = (Fault("barrier", "kill"),)
    least, waiting = trio_needs(corpus, streams=rung is Rung.LIVE)
    job.command([SURVIVOR], "set_budget", least, waiting)
    request = job.open("TP2", ["b", newcomer.node_id], rung=rung, cutover=SHORT)
    job.await_stage(job.members(request), request, "prepared", 40)
    assert job.stages(SURVIVOR, request.handoff_id)[-1][2]["host_bytes_peak"] == waiting
    job.permit(request)
    for member in (LEAVER, SURVIVOR):
        reason = job.reason(member, request, "aborted")
        assert "rank" in reason and any(phase in reason for phase in ("certificate", "barrier", "decision")), reason
    assert "swap_in_s" not in job.stages(SURVIVOR, request.handoff_id)[-1][2]
    job.trains_on()


@pytest.mark.timeout(400)  # as many steps as all tests above took
def test_after_all_this_every_step_was_that_of_a_job_left_alone(job: LiveTrio):
    assert_trained_as_if_nothing_had_happened(job)


@pytest.mark.thorough
def test_a_source_lost_after_the_boundary_costs_one_batch_and_the_state_moves_in_all_the_same(corpus: str):
    """GO-REDO: the weights come from masters that waited in host memory, and no gradient was read."""
    device, host = trio_needs(corpus, streams=True)
    setup = live_setup(corpus, job_arguments=small_gpt(corpus), record=True)
    with LiveTrio(replace(setup, extra_bytes_max=device, host_bytes_max=host)) as job:
        job.begin()
        job.arm(LEAVER, "norm", "hold")
        job.arm(SURVIVOR, "state read", "tell")
        request, newcomer = job.ready(Fault("state read", "tell"), cutover=SHORT)
        job.live(request)
        job.permit(request)
        job.await_passage(LEAVER, "norm")
        for member in (SURVIVOR, newcomer):
            job.await_passage(member, "state read")
        job.kill(LEAVER)
        job.await_stage([SURVIVOR, newcomer], request, "active", 30)
        said = job.stages(SURVIVOR, request.handoff_id)[-1][2]
        assert said["host_bytes_peak"] == host and said["swap_in_s"] > 0
        assert_started_at_the_version_held(job, newcomer)


# What is counted is what the kernel counts.

BIG = {"hidden_size": 512, "ffn_hidden_size": 1024}
SLACK = 24 << 20
"""Passing tensors of a step, and what an allocator keeps."""


@pytest.mark.thorough
def test_the_kernel_sees_no_more_than_both_accounts_say_and_all_of_it_comes_back(corpus: str):
    setup = RankSetup(small_gpt(corpus, **BIG), memory=True)
    device, host = tight(manifest_of(setup), ("PP2", 0), ("TP2", 1), streams=False)
    assert host > 3 * SLACK
    with Cluster(replace(setup, extra_bytes_max=device, host_bytes_max=host)) as cluster:
        members = cluster.launch("PP2", "ab").members
        cluster.await_step(members[0], 3)
        for number in range(2):
            before = resident(cluster, members)
            request = cluster.open("TP2", "ba")
            cluster.await_stage(members, request, "prepared", 60)
            waiting = resident(cluster, members)
            cluster.command(members, "abort", request.handoff_id, Reason("enough was seen", "abort"))
            for member in members:
                cluster.wait_for(lambda m=member, r=request: _said(cluster, m, r) == "aborted", 20, f"abort: {member}")
            if number == 0:  # In it a rank uses much for the first time.
                continue
            for member in members:
                grown = waiting[member] - before[member]
                assert (device + host) / 2 < grown < device + host + SLACK
                # What refers to itself in circles goes a second later.
                cluster.wait_for(
                    lambda m=member, b=before[member]: _latest(cluster, m) - b < SLACK, 10, f"return to {before} bytes"
                )

        before = resident(cluster, members)
        told = {member: len(cluster.ranks[member].events) for member in members}
        cluster.handoff("TP2", "ba")
        for member in members:
            events = cluster.ranks[member].events[told[member] :]
            # The world that went and the one that waited are not there beside the one that has come.
            switched = next(event[2] for event in events if event[0] == "resident at the switch")
            assert switched - before[member] < SLACK


@pytest.mark.thorough
@pytest.mark.parametrize("narrow", [{}, {"precision": "bf16", "grad_reduce_in_fp32": False}], ids=["fp32", "bf16"])
def test_at_its_peak_a_live_handoff_takes_what_its_account_says(corpus: str, narrow: dict[str, Any]):
    """Also where tiles, ring and gradients have 16 bits: those are fp32 on the way to a step, window by window."""
    model = small_gpt(corpus, **BIG, **narrow, num_layers=4, seq_length=8)
    setup = RankSetup(model, memory=True, global_batch=2, micro_batch=1, stream={"ring_depth": 4}, bring_up_s=8.0)
    with Cluster(setup) as cluster:
        members = cluster.launch("PP2", "ab").members
        cluster.await_step(members[0], 3)
        for number, (layout, nodes) in enumerate((("TP2", "ba"), ("PP2", "ab"), ("TP2", "ba"))):
            pids = {member: cluster.ranks[member].process.pid for member in members}
            before = settled(cluster, pids)
            request = cluster.open(layout, nodes, rung=Rung.LIVE)
            cluster.await_stage(members, request, "prepared", 90)
            assert cluster.verdict(members[0], request) == (str(Rung.LIVE), "")
            resident(cluster, members)  # it follows a few steps
            cluster.complete(request)
            if number == 0:  # In it a rank uses much for the first time.
                continue
            for member, pid in pids.items():
                account = cluster.stages(member, request.handoff_id)[-1][2]["extra_bytes_peak"]
                assert account > 5 * SLACK
                assert account / 2 < peak_bytes(pid) - before[member] < account + SLACK, (layout, member)


def settled(cluster: Cluster, pids: dict[Member, int]) -> dict[Member, int]:
    """Peaks of a few steps alone, as soon as what the last handoff left has gone; the kernel counts anew from here."""
    peaks = dict.fromkeys(pids, 0)

    def quiet() -> bool:
        before = dict(peaks)
        for pid in pids.values():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # forgets the peak: proc(5)
        resident(cluster, [*pids])
        peaks.update({member: peak_bytes(pid) for member, pid in pids.items()})
        return all(abs(peaks[member] - before[member]) < SLACK / 4 for member in pids)

    cluster.wait_for(quiet, 60, "steps that all take as much")
    return peaks


def peak_bytes(pid: int) -> int:
    """The most resident bytes that the process has had (VmHWM)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def _latest(cluster: Cluster, member: Member) -> int:
    return [event[2] for event in cluster.ranks[member].events if event[0] == "resident"][-1]


def _said(cluster: Cluster, member: Member, request: Any) -> str:
    return cluster.stages(member, request.handoff_id)[-1][0]
