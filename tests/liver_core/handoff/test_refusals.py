"""Why a member rejects an order, in numbers. Pure."""

from dataclasses import replace

from liver_core.handoff.refusals import amend_refusal
from tests.liver_core.handoff.samples import A, order


def test_a_revision_with_a_later_deadline_is_rejected_with_how_much_later_it_is():
    promised = order()
    later = replace(promised, plan_revision=2, deadline_utc=promised.deadline_utc + 12.5)
    refusal = amend_refusal(later, promised, A, now=0.0)
    assert refusal is not None
    assert refusal.text == "deadline_utc: a revision can only make it earlier, this one is 12.5 s later"
