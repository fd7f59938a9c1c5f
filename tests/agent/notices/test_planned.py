"""Every other payload of the metadata that can announce an end, as the clouds write it: what becomes of it."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from urllib.parse import urlparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.notices.aws import ACTION_PATH, EVENTS_PATH, GROUP_PATH, AwsImdsSource
from agent.notices.gcp import EVENT_PATH, EVENT_WITH_GPU_S, PREEMPTED_PATH, UPCOMING_PATH, GcpMetadataSource
from agent.notices.metadata_read import Unreadable
from agent.notices.planned import AWS_CODES, aws_events, aws_group_state, gcp_upcoming, merged
from agent.notices.source import Announced, Announcement, MachineName, Nothing, Observation, Unknown
from agent.notices.warning_budget import warning_budget
from agent.protocol.notice_life import LEAD
from agent.protocol.sync import NoticeKind, Provider
from deploy.local.metadata_server import ImdsServer, Instance
from tests.agent.notices.scripted_server import Reply, scripted

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
NO_SHIFT = timedelta(0)
GOOGLE = {"Metadata-Flavor": "Google"}
AWS_EVENT = {
    "NotBefore": "20 Nov 2026 12:05:00 GMT",
    "Code": "system-reboot",
    "Description": "scheduled reboot",
    "EventId": "instance-event-0d59937288b749b32",
    "NotAfter": "20 Nov 2026 14:05:00 GMT",
    "NotBeforeDeadline": "24 Nov 2026 12:05:00 GMT",
    "State": "active",
}
GCP_UPCOMING = {
    "type": "SCHEDULED",
    "canReschedule": False,
    "windowStartTime": "2026-11-20T12:05:00Z",
    "windowEndTime": "2026-11-20T16:05:00Z",
    "latestWindowStartTime": "2026-11-20T12:05:00Z",
    "maintenanceStatus": "PENDING",
    "maintenanceReasons": ["PLANNED_UPDATE"],
}


def events(*changes: dict[str, object]) -> tuple[Announcement, ...]:
    return aws_events(EVENTS_PATH, json.dumps([{**AWS_EVENT, **change} for change in changes]), NOON, NO_SHIFT)


@pytest.mark.parametrize("code", AWS_CODES)
def test_a_scheduled_event_of_ec2_that_is_near_takes_the_node_when_it_may_begin(code: str) -> None:
    (heard,) = events({"Code": code})
    assert (heard.kind, heard.deadline_utc) == (NoticeKind.MAINTENANCE, NOON + timedelta(minutes=5))
    assert heard.raw.startswith(f"{EVENTS_PATH}: {{") and code in heard.raw


def test_a_scheduled_event_that_is_days_away_is_advice_until_shortly_before() -> None:
    (far,) = events({"NotBefore": "27 Nov 2026 12:00:00 GMT"})
    assert (far.kind, far.deadline_utc) == (NoticeKind.REBALANCE, NOON + timedelta(days=7))
    body = json.dumps([{**AWS_EVENT, "NotBefore": "27 Nov 2026 12:00:00 GMT"}])
    for left, kind in ((LEAD, NoticeKind.MAINTENANCE), (LEAD + timedelta(seconds=1), NoticeKind.REBALANCE)):
        (heard,) = aws_events(EVENTS_PATH, body, NOON + timedelta(days=7) - left, NO_SHIFT)
        assert heard.kind is kind


def test_an_event_that_is_completed_or_canceled_and_an_empty_list_announce_nothing() -> None:
    assert events({"State": "completed"}, {"State": "canceled"}) == events() == ()


def test_the_time_of_an_event_is_by_the_clock_of_the_node() -> None:
    (heard,) = aws_events(EVENTS_PATH, json.dumps([AWS_EVENT]), NOON, timedelta(seconds=60))
    assert heard.deadline_utc == NOON + timedelta(minutes=6)


@pytest.mark.parametrize("body", ["{}", "no json", "[" * 50_000, json.dumps([AWS_EVENT] * 101)])
def test_what_is_no_list_of_events_is_never_no_events(body: str) -> None:
    with pytest.raises(Unreadable, match=EVENTS_PATH):
        aws_events(EVENTS_PATH, body, NOON, NO_SHIFT)


@pytest.mark.parametrize("other", [1, {"Code": "party"}, {"NotBefore": "soon"}, {"NotBefore": ""}, {"NotBefore": 7}])
def test_an_event_that_cannot_be_read_hides_no_other_one_and_is_named(other: object) -> None:
    bad = {**AWS_EVENT, **other} if isinstance(other, dict) else other
    body, (good,) = json.dumps([bad, AWS_EVENT]), events({})

    async def run() -> Observation:
        def answer(asked: str) -> Reply:
            return Reply(body="t") if "PUT" in asked else Reply(body=body) if EVENTS_PATH in asked else Reply(404)

        async with scripted(answer) as server:
            source = AwsImdsSource(server.url, monotonic=lambda: 0.0, now=lambda: NOON)
            seen = await source.observe()
            await source.close()
            return seen

    seen = asyncio.run(run())
    assert isinstance(seen, Unknown) and seen.reason.startswith(EVENTS_PATH)
    assert seen.announcements == (good,)


@pytest.mark.parametrize("state", ["Terminated", "Warmed:Terminated", "Warmed:Stopped", "Warmed:Hibernated"])
def test_a_group_that_lets_the_instance_go_takes_the_node_without_naming_a_time(state: str) -> None:
    assert aws_group_state(GROUP_PATH, state) == Announcement(
        NoticeKind.INTERRUPTION, None, f"{GROUP_PATH}: {state}"
    )  # fmt: skip


@pytest.mark.parametrize("state", ["InService", "Detached", "Standby", "Warmed:Running", "InService\n"])
def test_a_group_that_keeps_or_releases_the_instance_announces_nothing(state: str) -> None:
    assert aws_group_state(GROUP_PATH, state) is None


def test_a_state_of_a_group_that_is_not_known_is_never_no_notice() -> None:
    with pytest.raises(Unreadable, match="must be one of InService, "):
        aws_group_state(GROUP_PATH, "Retired")


def test_the_aws_source_hears_group_and_events_and_of_two_ends_the_nearest() -> None:
    server = ImdsServer().start()

    async def run() -> list[Observation]:
        source = AwsImdsSource(server.url, monotonic=lambda: 0.0, now=lambda: datetime.now(UTC))
        seen = []
        requests: list[dict[str, object]] = [
            {"do": "group", "state": "InService"},
            {"do": "group"},
            {"do": "interrupt", "ends_in_s": 90},
            {"do": "maintenance", "starts_in_s": 300},
        ]
        for request in requests:
            assert server.instance.change(request) == ""
            seen.append(await source.observe())
        await source.close()
        return seen

    quiet, group, both, all_three = asyncio.run(run())
    server.stop()
    assert quiet == Nothing()
    assert isinstance(group, Announced) and group.announcements[0].deadline_utc is None
    assert isinstance(both, Announced) and len(both.announcements) == 1
    assert both.announcements[0].deadline_utc is not None
    assert ACTION_PATH in both.announcements[0].raw and GROUP_PATH in both.announcements[0].raw
    assert isinstance(all_three, Announced)
    assert {item.kind for item in all_three.announcements} == {NoticeKind.INTERRUPTION, NoticeKind.MAINTENANCE}


def test_keys_that_hang_one_after_the_other_are_noticed_within_three_timeouts() -> None:
    clock = [0.0]

    def answer(asked: str) -> Reply:
        if "PUT" in asked:
            return Reply(body="t")
        clock[0] += 0.9
        return Reply(500)

    async def run() -> tuple[Observation, int]:
        async with scripted(answer) as server:
            source = AwsImdsSource(server.url, monotonic=lambda: clock[0], now=lambda: NOON, timeout_s=1.0)
            seen = await source.observe()
            await source.close()
            return seen, len(server.asked)

    seen, asked = asyncio.run(run())
    assert isinstance(seen, Unknown) and "those before them took too long" in seen.reason
    assert asked == 5, "a token and four keys"


def upcoming(**changes: object) -> Announcement | None:
    return gcp_upcoming(UPCOMING_PATH, json.dumps({**GCP_UPCOMING, **changes}), NOON)


def test_upcoming_maintenance_of_gcp_takes_the_node_shortly_before_its_window_and_is_advice_earlier() -> None:
    near, far = upcoming(), upcoming(windowStartTime="2026-11-27T12:00:00Z")
    assert near is not None and far is not None
    assert (near.kind, near.deadline_utc) == (NoticeKind.MAINTENANCE, NOON + timedelta(minutes=5))
    assert (far.kind, far.deadline_utc) == (NoticeKind.REBALANCE, NOON + timedelta(days=7))


def test_maintenance_that_goes_on_is_due_now_and_both_spellings_of_the_fields_are_read() -> None:
    body = json.dumps({"maintenance_status": "ONGOING", "window_start_time": "2026-11-20T12:05:00+00:00"})
    heard = gcp_upcoming(UPCOMING_PATH, body, NOON)
    assert heard is not None and (heard.kind, heard.deadline_utc) == (NoticeKind.MAINTENANCE, NOON)


@pytest.mark.parametrize(
    "change", [{"maintenanceStatus": "PARTY"}, {"windowStartTime": None}, {"windowStartTime": "7"}]
)
def test_upcoming_maintenance_that_cannot_be_read_is_never_none(change: dict[str, object]) -> None:
    with pytest.raises(Unreadable, match="maintenanceStatus must be PENDING or ONGOING"):
        upcoming(**change)


QUIET = {
    PREEMPTED_PATH: Reply(body="FALSE", headers={**GOOGLE, "ETag": "e"}),
    EVENT_PATH: Reply(body="NONE", headers=GOOGLE),
    UPCOMING_PATH: Reply(404, headers=GOOGLE),
}


def gcp(*looks: dict[str, Reply], every_s: float = 10, notice_s: int = 0, event_s: float = 60) -> list[Observation]:
    """What is seen where the keys answer so, one look every so many seconds from noon on."""
    clock = [NOON]

    async def run() -> list[Observation]:
        replies = {**QUIET}
        async with scripted(lambda asked: replies[urlparse(asked.split()[1]).path]) as server:
            budget = warning_budget(Provider.GCP, notice_s)
            source = GcpMetadataSource(server.url, budget=budget, event_s=event_s, now=lambda: clock[0])
            seen = []
            for look in looks:
                clock[0] += timedelta(seconds=every_s)
                replies.update(look)
                seen.append(await source.observe())
            await source.close()
            return seen

    return asyncio.run(run())


def of(seen: Observation) -> tuple[Announcement, ...]:
    assert not isinstance(seen, Nothing)
    return seen.announcements


TRUE, DOWN = Reply(body="TRUE", headers=GOOGLE), Reply(503)


@pytest.mark.parametrize(("notice_s", "left_s"), [(0, 20), (120, 110)])
def test_a_deadline_counts_from_the_last_good_read_and_not_from_when_it_was_seen(notice_s: int, left_s: int) -> None:
    _, seen = gcp({}, {PREEMPTED_PATH: TRUE}, notice_s=notice_s)
    assert of(seen)[0].deadline_utc == NOON + timedelta(seconds=20 + left_s)


def test_reads_that_fail_in_between_take_from_the_time_and_never_more_than_there_is() -> None:
    _, unread, seen, later = gcp({}, {PREEMPTED_PATH: DOWN}, {PREEMPTED_PATH: TRUE}, {})
    assert isinstance(unread, Unknown)
    assert of(seen)[0].deadline_utc == of(later)[0].deadline_utc == NOON + timedelta(seconds=40)
    _, _, _, _, _, seen = gcp({}, {PREEMPTED_PATH: DOWN}, {}, {}, {}, {PREEMPTED_PATH: TRUE})
    assert of(seen)[0].deadline_utc == NOON + timedelta(seconds=60), "now: the machine is still there"


@pytest.mark.parametrize("event_s", [60, EVENT_WITH_GPU_S])
def test_a_maintenance_event_takes_the_node_with_the_time_that_its_kind_of_machine_gets(event_s: float) -> None:
    event = Reply(body="TERMINATE_ON_HOST_MAINTENANCE", headers=GOOGLE)
    _, seen, again, over = gcp({}, {EVENT_PATH: event}, {}, {EVENT_PATH: QUIET[EVENT_PATH]}, event_s=event_s)
    (heard,) = of(seen)
    assert (heard.kind, heard.is_estimate) == (NoticeKind.MAINTENANCE, True)
    assert heard.deadline_utc == NOON + timedelta(seconds=10 + event_s) == of(again)[0].deadline_utc
    assert over == Nothing()


def test_a_live_migration_of_the_machine_is_advice() -> None:
    (seen,) = gcp({EVENT_PATH: Reply(body="MIGRATE_ON_HOST_MAINTENANCE", headers=GOOGLE)})
    assert [(item.kind, item.deadline_utc) for item in of(seen)] == [(NoticeKind.REBALANCE, None)]


def test_a_preemption_waits_for_no_other_key_and_withdraws_none() -> None:
    event = Reply(body="TERMINATE_ON_HOST_MAINTENANCE", headers=GOOGLE)
    _, seen = gcp({EVENT_PATH: event}, {PREEMPTED_PATH: TRUE, EVENT_PATH: Reply(drips=True, headers=GOOGLE)})
    assert {item.kind for item in of(seen)} == {NoticeKind.INTERRUPTION, NoticeKind.MAINTENANCE}


@pytest.mark.parametrize("path", [EVENT_PATH, UPCOMING_PATH])
@pytest.mark.parametrize("reply", [Reply(500), Reply(body="NONE"), Reply(404), Reply(body="{}", headers=GOOGLE)])
def test_a_key_of_maintenance_that_cannot_be_read_is_unknown(path: str, reply: Reply) -> None:
    (seen,) = gcp({path: reply})
    assert isinstance(seen, Unknown) and path in seen.reason


def test_the_metadata_server_for_rehearsals_announces_maintenance_as_gcp_does() -> None:
    server = ImdsServer().start()

    async def run() -> list[Observation]:
        source = GcpMetadataSource(
            server.url, budget=warning_budget(Provider.GCP), long_poll_s=0, now=lambda: datetime.now(UTC)
        )
        seen = []
        requests: list[dict[str, object]] = [
            {"do": "clear"},
            {"do": "maintenance"},
            {"do": "maintenance", "starts_in_s": 30},
        ]
        for request in requests:
            assert server.instance.change(request) == ""
            seen.append(await source.observe())
        await source.close()
        return seen

    quiet, far, near = asyncio.run(run())
    server.stop()
    assert quiet == Nothing()
    assert [item.kind for item in of(far)] == [NoticeKind.REBALANCE]
    assert {item.kind for item in of(near)} == {NoticeKind.MAINTENANCE}


def test_both_sources_say_which_machine_this_is() -> None:
    server = ImdsServer(Instance(instance_id="i-0a1b2c3d", zone="us-east-1b")).start()

    async def run() -> list[MachineName | None]:
        aws = AwsImdsSource(server.url, monotonic=lambda: 0.0, now=lambda: NOON)
        gcp = GcpMetadataSource(server.url, budget=warning_budget(Provider.GCP), now=lambda: NOON)
        found = [await source.machine() for source in (aws, gcp)]
        await aws.close()
        await gcp.close()
        return found

    on_aws, on_gcp = asyncio.run(run())
    server.stop()
    assert on_aws == MachineName("i-0a1b2c3d", "us-east-1b")
    assert on_gcp is not None and on_gcp.provider_id.isdigit() and on_gcp.zone == "us-east-1b"


def test_a_machine_whose_name_cannot_be_read_is_unreadable() -> None:
    async def run(reply: Reply) -> None:
        async with scripted(lambda asked: Reply(body="t") if "PUT" in asked else reply) as server:
            aws = AwsImdsSource(server.url, monotonic=lambda: 0.0, now=lambda: NOON)
            gcp = GcpMetadataSource(server.url, budget=warning_budget(Provider.GCP), now=lambda: NOON)
            for source in (aws, gcp):
                with pytest.raises(Unreadable):
                    await source.machine()
                await source.close()

    for reply in (Reply(404), Reply(500), Reply(200, "")):
        asyncio.run(run(reply))


ANNOUNCEMENTS = st.lists(
    st.builds(
        Announcement,
        st.sampled_from(NoticeKind),
        st.none() | st.integers(0, 999).map(lambda after_s: NOON + timedelta(seconds=after_s)),
        st.text(max_size=600),
        st.booleans(),
    ),
    max_size=6,
)


@given(ANNOUNCEMENTS)
def test_of_each_kind_one_remains_with_the_nearest_deadline(announced: list[Announcement]) -> None:
    found = {item.kind: item for item in merged(announced)}
    assert len(found) == len(merged(announced)) and found.keys() == {item.kind for item in announced}
    for kind, item in found.items():
        deadlines = [each.deadline_utc for each in announced if each.kind is kind and each.deadline_utc is not None]
        assert item.deadline_utc == min(deadlines, default=None) and len(item.raw) <= 1_000


def test_of_two_announcements_of_a_kind_the_nearer_comes_first_and_one_without_a_time_last() -> None:
    def said(after_s: int | None, raw: str, *, is_estimate: bool = False) -> Announcement:
        deadline = None if after_s is None else NOON + timedelta(seconds=after_s)
        return Announcement(NoticeKind.MAINTENANCE, deadline, raw, is_estimate)

    none, near, far = said(None, "none"), said(30, "near", is_estimate=True), said(60, "far")
    advice = Announcement(NoticeKind.REBALANCE, None, "advice")
    assert merged([none, far, advice, near]) == (said(30, "near; far; none", is_estimate=True), advice)
    assert merged([none, far]) == (said(60, "far; none"),)
