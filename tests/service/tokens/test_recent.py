"""Tokens of nodes verified a moment ago: how long they are believed, and that no others are."""

from datetime import UTC, datetime, timedelta

import pytest

from service.tokens.operations import Caller
from service.tokens.recent import FRESH, KEPT_MAX, RENEWED_AFTER, RecentNodes
from service.tokens.tables import Role

NOW = datetime(2026, 1, 1, tzinfo=UTC)
AGENT = Caller("id", Role.NODE, "node a", node_id="a")


def test_a_token_is_believed_until_its_verification_is_thirty_seconds_old():
    recent = RecentNodes()
    recent.keep("secret", AGENT, now=NOW, seen=0)
    assert timedelta(seconds=30) == FRESH
    assert recent.find("secret", now=NOW + timedelta(seconds=29.9)) == AGENT
    assert recent.find("secret", now=NOW + FRESH) is None
    assert recent.find("secret", now=NOW - timedelta(seconds=1)) is None, "the clock was put back"
    assert recent.find("other", now=NOW) is None


def test_a_token_that_expires_is_not_believed_beyond_that():
    recent = RecentNodes()
    recent.keep("secret", Caller("id", Role.NODE, "node a", NOW + timedelta(seconds=1)), now=NOW, seen=0)
    assert recent.find("secret", now=NOW + timedelta(seconds=0.9)) is not None
    assert recent.find("secret", now=NOW + timedelta(seconds=1)) is None


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.NODE])
def test_any_other_token_is_never_kept(role):
    recent = RecentNodes()
    recent.keep("secret", Caller("id", role, "ci"), now=NOW, seen=0)
    assert recent.find("secret", now=NOW) is None


def test_no_more_than_so_many_are_kept_and_the_one_verified_longest_ago_goes():
    recent = RecentNodes()
    for number in range(KEPT_MAX):
        recent.keep(f"secret {number}", AGENT, now=NOW, seen=0)
    recent.keep("secret 0", AGENT, now=NOW, seen=0)
    recent.keep("one more", AGENT, now=NOW, seen=0)
    assert recent.find("secret 0", now=NOW) == AGENT
    assert recent.find("secret 1", now=NOW) is None


def test_after_a_revocation_every_token_is_looked_up_again():
    recent = RecentNodes()
    recent.keep("secret", AGENT, now=NOW, seen=0)
    recent.forget()
    assert recent.find("secret", now=NOW) is None
    assert recent.node_of("secret") == "a", "whose it was is still known"
    recent.keep("secret", AGENT, now=NOW, seen=recent.times_forgotten)
    assert recent.find("secret", now=NOW) == AGENT


def test_a_token_that_was_looked_up_before_a_revocation_is_not_kept_after_it():
    recent = RecentNodes()
    seen = recent.times_forgotten
    recent.forget()
    recent.keep("secret", AGENT, now=NOW, seen=seen)
    assert recent.find("secret", now=NOW) is None


def test_tokens_that_were_looked_up_again_together_are_believed_anew():
    recent, later = RecentNodes(), NOW + RENEWED_AFTER
    recent.keep("one", Caller("1", Role.NODE, "node a", node_id="a"), now=NOW, seen=0)
    recent.keep("two", Caller("2", Role.NODE, "node b", node_id="b"), now=NOW, seen=0)
    assert recent.due(now=NOW) == [], "just verified"
    assert recent.due(now=later) == ["1", "2"]
    recent.renew({"1"}, now=later, seen=0)
    assert recent.due(now=later) == ["2"]
    assert recent.find("one", now=NOW + FRESH) is not None
    assert recent.find("two", now=NOW + FRESH) is None, "it was not among the valid ones"


def test_a_token_that_has_expired_is_not_looked_up_again_for_nothing():
    recent = RecentNodes()
    recent.keep("one", Caller("1", Role.NODE, "node a", NOW + RENEWED_AFTER), now=NOW, seen=0)
    assert recent.due(now=NOW + RENEWED_AFTER) == []


def test_what_was_looked_up_again_before_a_revocation_is_not_believed_after_it():
    recent, seen = RecentNodes(), 0
    recent.keep("one", Caller("1", Role.NODE, "node a", node_id="a"), now=NOW, seen=seen)
    recent.forget()
    recent.renew({"1"}, now=NOW, seen=seen)
    assert recent.find("one", now=NOW) is None
    assert recent.due(now=NOW) == ["1"], "forgotten ones are the first to be looked up again"


def test_of_more_tokens_than_are_kept_one_that_was_not_renewed_goes_first():
    recent = RecentNodes()
    for number in range(KEPT_MAX):
        recent.keep(f"secret {number}", Caller(str(number), Role.NODE, "node a", node_id="a"), now=NOW, seen=0)
    recent.renew({"0", "1"}, now=NOW, seen=0)
    recent.keep("one more", AGENT, now=NOW, seen=0)
    assert recent.find("secret 0", now=NOW) is not None
    assert recent.find("secret 2", now=NOW) is None
