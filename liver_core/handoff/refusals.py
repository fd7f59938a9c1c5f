"""Which orders a participant rejects, and why: the one handler of late, repeated, foreign and stale messages.

Pure. A refusal rejects one message. The sender may send the order again, and it may be accepted then.
"""

from liver_core.handoff.messages import PROTOCOL_VERSION, Order, Phase, Promise, Reason, Rung
from liver_core.handoff.participant_events import ParticipantRecord
from liver_core.layout import Member

REFUSED = "refused"
"""The phase of the reason of an order that was rejected: nothing has failed."""
_PHASE_ORDER = {Phase.PREPARE: 0, Phase.PERMIT: 1, Phase.WITHDRAW: 2, Phase.RETIRE: 3, Phase.ABORT: 4}


def is_stale(order: Order, promise: Promise) -> bool:
    """Whether an order of the promised handoff is older than what was already accepted."""
    wanted = (order.plan_revision, _PHASE_ORDER[order.phase])
    return wanted < (promise.plan_revision, _PHASE_ORDER[promise.phase])


def is_replaced(record: ParticipantRecord, generation: int) -> bool:
    """Whether it is news that the service has started `generation`: no number below it counts any more. An older world
    may be held all the same where a greater number was heard of, such as that of an aborted handoff."""
    if record.highest_generation < generation - 1:
        return True
    if record.start is not None or record.replaced is not None:
        return record.start is not None and record.start.generation < generation
    held = (world.generation for world in (record.active, record.promise) if world is not None)
    return any(number < generation for number in held)


def is_new_start(order: Order, record: ParticipantRecord, member: Member, job_id: str) -> bool:
    """Whether the member has a rank to start that it has not heard of, and knows of nothing newer. A rank that died in
    a newer world, of which the service does not know, has used that world's number too."""
    is_ours = order.job_id == job_id and member in order.target.members
    return is_ours and order.generation > record.highest_generation


def is_promised(order: Order, promise: Promise, held: Order | None) -> bool:
    """Whether the order is of the promised attempt. Two agents that do not hear each other may both open what the
    service proposes: its name is one, the leads are two, and so are the numbers where both know as many."""
    is_same = (promise.handoff_id, promise.generation) == (order.handoff_id, order.generation)
    return is_same and (held is None or held.proposer_id == order.proposer_id)


def ends_promise(order: Order, promised: Order | None) -> bool:
    """Whether the proposer of the promised handoff opens its next one here. It has at most one open at a time: the
    promised one has ended, and its abort did not arrive."""
    return (
        promised is not None
        and order.phase is Phase.PREPARE
        and (order.job_id, order.proposer_id, order.parent) == (promised.job_id, promised.proposer_id, promised.parent)
        and order.generation > promised.generation
    )


def prepare_refusal(order: Order, record: ParticipantRecord, member: Member, job_id: str, now: float) -> Reason | None:
    """Why this member rejects a handoff to which it has no promise yet, or None."""
    rank = None if record.active is None else record.active.rank_of(member)
    text = _envelope_refusal(order, job_id, member) or _fence_refusal(order, record) or _rung_refusal(order)
    text = text or _source_refusal(order, record)
    if text is None and _runs_no_rank(order, record, member):
        why = "" if record.reason is None else f" ({record.reason})"
        text = f"source: this member runs no rank of generation {order.parent}{why}"
        return Reason(text, REFUSED, cause=None if record.reason is None else record.reason.cause)
    text = text or _part_refusal(order, member) or _deadline_refusal(order, member, now)
    return None if text is None else Reason(text, REFUSED, rank=rank)


def amend_refusal(order: Order, promised: Order, member: Member, now: float) -> Reason | None:
    """Why this member rejects a newer revision of the promised handoff, or None."""
    if (order.generation, order.parent) != (promised.generation, promised.parent):
        text = f"a revision must keep generation {promised.generation} of parent {promised.parent}"
    elif order.source != promised.source:
        text = "a revision must keep the source roster"
    elif order.deadline_utc > promised.deadline_utc:
        late_s = order.deadline_utc - promised.deadline_utc
        text = f"deadline_utc: a revision can only make it earlier, this one is {late_s:.1f} s later"
    else:
        text = _rung_refusal(order) or _part_refusal(order, member) or _deadline_refusal(order, member, now)
    return None if text is None else Reason(text, REFUSED)


def _envelope_refusal(order: Order, job_id: str, member: Member) -> str | None:
    if order.protocol_version != PROTOCOL_VERSION:
        return f"protocol_version: must be {PROTOCOL_VERSION}, is {order.protocol_version}"
    if order.job_id != job_id:
        return f"job_id: this participant belongs to {job_id}, not to {order.job_id}"
    if order.phase is not Phase.PREPARE and not (order.phase is Phase.PERMIT and _comes_later(order, member)):
        return f"phase: {order.phase} of a handoff that was never promised here"
    return None


def _comes_later(order: Order, member: Member) -> bool:
    """A newcomer to a rescue, for which permission does not wait: that may be the first that it hears."""
    return order.rung is Rung.RESCUE and order.source is not None and member not in order.source.members


def _fence_refusal(order: Order, record: ParticipantRecord) -> str | None:
    if record.promise is not None:
        return f"promised to handoff {record.promise.handoff_id} of generation {record.promise.generation}"
    if order.generation <= record.highest_generation:
        return f"generation: {order.generation} is used up, the highest seen is {record.highest_generation}"
    return None


def _rung_refusal(order: Order) -> str | None:
    """A handoff takes over what a living world has. Whatever else starts a world is the service's."""
    if order.source is None:
        return "source: a handoff has one; a world without is started by the service"
    return None if order.takes_over else f"rung: must be a live one; {order.rung} is the service's"


def _source_refusal(order: Order, record: ParticipantRecord) -> str | None:
    if order.generation <= order.parent or order.target.generation != order.generation:
        return f"generation: {order.generation} does not fit parent {order.parent} and the target roster"
    active = record.active
    if active is not None and order.parent != active.generation:
        return f"parent: this member trains in generation {active.generation}, not {order.parent}"
    if active is not None and order.source != active:
        return f"source: not the roster of generation {active.generation} in which this member trains"
    return None


def _runs_no_rank(order: Order, record: ParticipantRecord, member: Member) -> bool:
    """Whether the order takes over what a rank of this member has, and there is none."""
    return record.active is None and order.source is not None and member in order.source.members


def _part_refusal(order: Order, member: Member) -> str | None:
    if member in order.target.members or (order.source is not None and member in order.source.members):
        return None
    return "target: this member has no part in it"


def _deadline_refusal(order: Order, member: Member, now: float) -> str | None:
    # A newcomer to a rescue has longer: leavers may have been released by the deadline, counting on it.
    late_s = now - order.boundary_by(member)
    return f"deadline_utc: passed {late_s:.1f} s ago" if late_s > 0 else None
