"""What to do when nodes will go: whose turn it is to lead, which world comes next, until when, and on which rung.

Pure: everything known comes in, a decision with its reason comes out.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from agent.notices.warning_budget import WarningBudget
from agent.protocol.jobfile import ModelShape
from agent.protocol.notice_life import heard_until, is_open
from agent.protocol.sync import HandoffOrder, JobOrder, NoticeFact
from agent.protocol.values import utc
from liver_core.handoff import LadderInputs
from liver_core.handoff.leader_events import HandoffWanted, NoPlan, Plan, Wait
from liver_core.layout import Member, ParallelLayout, Roster
from liver_core.layout.limits import listed
from liver_core.reshard import seat

HANDOFF_DEADLINE_S = 180.0
"""Of a handoff where nothing presses."""
SERVICE_WAIT_S, SERVICE_WAIT_SHARE = 3.0, 0.1
"""How long a plan that no standing plan covers is left to the service, before the layouts by count are used: at most so
much of the time that is left. Only the loss of several nodes is: of each node alone the service says its plan before,
and where it has not, it does not know this world yet."""
BYTES_PER_PARAMETER = 12
"""An fp32 master and two fp32 moments: what travels, by decision D7."""
BANDWIDTH_GUESS_BYTES_PER_S, PREPARE_GUESS_S, ENDPOINTS_GUESS_S = 500e6, 5.0, 1.0
"""Until a handoff has measured them. Endpoints are all that a rescue prepares."""
STREAM_SHARE, REPLAY_SHARE = 0.5, 0.1
"""Guesses: of the bandwidth that streaming gets, and of a step that a replay takes."""
MARGIN_GUESS_S, MARGIN_LEAST_S, MARGIN_MOST_S = 2.0, 0.5, 4.0
"""How much later than estimated a rung may end and still be in time: what earlier handoffs came late, within bounds."""
STEP_GUESS_S, STEP_GUESS_TIMES = 2.0, 2.0
"""Where nobody could tell how long a step takes, it counts as so long, and as so many times what following one takes:
ranks that cannot follow find that out themselves."""
GRADIENT_BYTES_PER_PARAMETER = 4
"""What a target reads of each step that it follows."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """How the job steps: the last step on this node, how long ago it ended, and the median seconds of one, 0 where that
    is not known. `save_s`: of its newest checkpoint, None if this node has reported none. `deviation_s`: how far the
    last steps lie from their median, in the median; None after too few steps. `build_s`: what a rank here took to build
    its newest world, 0 where none has."""

    step: int
    step_age_s: float
    median_step_s: float
    checkpoint_step: int | None
    save_s: float | None = None
    deviation_s: float | None = None
    build_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What earlier handoffs of the job measured; None or empty where none did. Seconds, bytes per second.

    `stream_failure` is why streaming failed in generation `failed_in`, `rescue_failure` why a rescue did in generation
    `rescue_failed_in`; in another world they are tried again. `replay_refusal` holds for the job's life, as its
    optimizer does. `memory_refusal` is why there was no room for a world of the layout `refused_layout` beside
    generation `refused_in`. `late_s`: how much later than estimated the newest handoffs were safe, newest last.
    """

    bandwidth_bytes_per_s: float | None = None
    prepare_s: float | None = None
    endpoints_s: float | None = None
    follow_s: float | None = None
    replay_refusal: str = ""
    stream_failure: str = ""
    failed_in: int = 0
    memory_refusal: str = ""
    refused_in: int = 0
    refused_layout: str = ""
    rescue_failure: str = ""
    rescue_failed_in: int = 0
    late_s: tuple[float, ...] = ()

    @property
    def margin_s(self) -> float:
        """How much later than estimated the next handoff may be safe."""
        return min(MARGIN_MOST_S, max(MARGIN_LEAST_S, *self.late_s)) if self.late_s else MARGIN_GUESS_S


def lead_candidates(order: JobOrder, active: Roster, leaving: Iterable[str]) -> tuple[str, ...]:
    """Who may lead, first choice first: the service's order, then rank order; never a node that will go. Where every
    member will, the nodes that come."""
    gone = set(leaving)
    members = active.node_ids()
    ordered = [node_id for node_id in order.lead_order if node_id in members]
    staying = tuple(node_id for node_id in dict.fromkeys((*ordered, *members)) if node_id not in gone)
    return staying or tuple(node_id for node_id in _nodes_that_come(order, active, gone) if node_id not in gone)


def _nodes_that_come(order: JobOrder, active: Roster, leaving: set[str]) -> tuple[str, ...]:
    """By what the service proposes now, else by its plan for the loss of exactly these, else the spares."""
    if order.handoff is not None and order.handoff.parent == active.generation:
        return order.handoff.target.node_ids()
    plans = (plan for plan in order.standing_plans if (plan.parent, {*plan.leaving}) == (active.generation, leaving))
    spares = tuple(dict.fromkeys(member.node_id for member in order.spares))
    return next((plan.target.node_ids() for plan in plans if plan.target is not None), spares)


def plan_loss(
    order: JobOrder,
    active: Roster,
    leaving: frozenset[str],
    *,
    left_s: float,
    waited_s: float,
    service_is_there: bool,
    barred: frozenset[str] = frozenset(),
) -> Plan | Wait | NoPlan:
    """The world without these nodes: the standing plan for exactly them that takes none of the `barred`, or one made
    from the layouts by count, which takes spares for what goes."""
    for plan in order.standing_plans:
        takes_barred = plan.target is not None and barred & set(plan.target.node_ids())
        if plan.parent == active.generation and frozenset(plan.leaving) == leaving and not takes_barred:
            if plan.target is None:
                return NoPlan(f"standing plan: {plan.reason}")
            target = plan.target
            return Plan(target.layout, target.members, plan.plan_digest, f"standing plan: {plan.reason}")
    wait_s = min(SERVICE_WAIT_S, SERVICE_WAIT_SHARE * left_s) if len(leaving) > 1 else 0.0
    if service_is_there and waited_s < wait_s:
        return Wait(f"no standing plan covers the loss of {listed(sorted(leaving))}; the service is asked")
    return _plan_by_count(order, active, leaving, barred)


def parameters_only_of(model: ModelShape, layout: ParallelLayout, ranks: Iterable[int]) -> int:
    """Estimate of the parameters that none but these ranks hold: by ZeRO-1 an element has one owner in its pipeline
    stage, and the ranks of a stage own equally many, of experts too: EP, ETP and their ZeRO-1 shards cut these over all
    of them. What tensor parallelism copies (norms, biases) has several owners, and is too little to be told apart."""
    layers, embedding = model.num_layers // layout.pp, model.padded_vocab_size * model.hidden_size
    stages = [layout.coordinates(rank).pp for rank in ranks]
    whole = sum(
        model.layer_parameters(stage * layers, (stage + 1) * layers)
        + ((stage == 0) + (stage == layout.pp - 1)) * embedding
        for stage in stages
    )
    return whole // layout.stage_size


def wanted_of(
    wanted: HandoffOrder, notices: Iterable[NoticeFact], *, now: float, budget: WarningBudget
) -> HandoffWanted:
    """What the service proposes: until the deadline of its notices where there are any, counted from when the first of
    them was heard. What is reserved of that for delays, and then what a machine may go late, is used where nothing else
    is left. `notices`: those that the service tells."""
    deadline, notice_at = now + HANDOFF_DEADLINE_S, None
    if wanted.leaving or wanted.deadline_utc is not None:
        heard = [fact for fact in notices if fact.node_id in wanted.leaving and is_open(fact, utc(now))]
        notice_at = min((fact.first_seen_utc for fact in heard), default=wanted.proposed_utc).timestamp()
        if wanted.deadline_utc is not None:
            safe_by = budget.safe_by_utc(utc(notice_at), wanted.deadline_utc)
            ends = (safe_by, wanted.deadline_utc, *sorted(map(heard_until, heard)))
            deadline = next((at for at in ends if at > utc(now)), wanted.deadline_utc).timestamp()
    return HandoffWanted(
        handoff_id=str(wanted.handoff_id),
        parent=wanted.parent,
        cause=str(wanted.cause),
        plan=Plan(wanted.target.layout, wanted.target.members, wanted.plan_digest, wanted.reason),
        leaving=frozenset(wanted.leaving),
        deadline_utc=deadline,
        notice_at=notice_at,
    )


def ladder_inputs(
    order: JobOrder,
    source: Roster,
    plan: Plan,
    leaving: frozenset[str],
    left_s: float | None,
    *,
    pulse: Pulse,
    learned: Learned,
    wire_bytes_per_s: float | None = None,
) -> LadderInputs:
    """What the ladder chooses from. Guesses stand where nothing was measured; `left_s` None: nothing
    presses. `wire_bytes_per_s`: what one node gets of another, None where that was not measured. Whether a rank can
    stream at all it finds out itself, and falls to the next rung with its reason."""
    parameters = order.spec.model.parameters()
    bandwidth = _bandwidth(source, plan, learned, wire_bytes_per_s)
    read_s = GRADIENT_BYTES_PER_PARAMETER * parameters / bandwidth
    learned_s = read_s if learned.follow_s is None else learned.follow_s
    step_s = pulse.median_step_s or max(STEP_GUESS_S, STEP_GUESS_TIMES * learned_s)
    going = [rank for rank, member in enumerate(source.members) if member not in plan.members]
    staying = set(source.node_ids()) - leaving
    micro_batches = order.spec.micro_batches(source.layout)
    part = None if order.spec.drop_step is None else order.spec.drop_step.part_of_step(micro_batches)
    age = None if pulse.checkpoint_step is None else max(0, pulse.step - pulse.checkpoint_step)
    bytes_to_move, refused = BYTES_PER_PARAMETER * parameters, (source.generation, str(plan.layout))
    return LadderInputs(
        bytes_to_move=bytes_to_move,
        bandwidth_bytes_per_s=bandwidth,
        prepare_s=learned.prepare_s or max(PREPARE_GUESS_S, pulse.build_s),
        step_s=step_s,
        seconds_to_boundary=max(0.0, step_s - pulse.step_age_s),
        seconds_to_deadline=left_s,
        margin_s=learned.margin_s,
        sources_whole=True,
        nodes_left=len(staying | {member.node_id for member in plan.members}),
        nodes_least=order.spec.nodes.min,
        checkpoint_age_steps=age,
        stream_share=_stream_share(order, source, bandwidth),
        follow_s=learned.follow_s if learned.follow_s is not None else read_s + REPLAY_SHARE * step_s,
        one_sided=True,
        replay_refusal=learned.replay_refusal,
        stream_failure=learned.stream_failure if learned.failed_in == source.generation else "",
        memory_refusal=learned.memory_refusal if refused == (learned.refused_in, learned.refused_layout) else "",
        bytes_only_leaving=BYTES_PER_PARAMETER * parameters_only_of(order.spec.model, source.layout, going),
        endpoints_s=learned.endpoints_s if learned.endpoints_s is not None else ENDPOINTS_GUESS_S,
        ranks_staying=len(source.members) - len(going),
        rescue_failure=learned.rescue_failure if learned.rescue_failed_in == source.generation else "",
        part_s=None if part is None else part * step_s,
        step_deviation_s=pulse.deviation_s,
    )


def _bandwidth(source: Roster, plan: Plan, learned: Learned, wire_bytes_per_s: float | None) -> float:
    """Bytes a second of the whole move: as the last copy made it, else as many pairs of nodes as there can be, each as
    one was measured, else a guess."""
    pairs = min(len(source.node_ids()), len({member.node_id for member in plan.members}))
    by_wire = None if wire_bytes_per_s is None else pairs * wire_bytes_per_s
    return learned.bandwidth_bytes_per_s or by_wire or BANDWIDTH_GUESS_BYTES_PER_S


def _stream_share(order: JobOrder, source: Roster, bandwidth: float) -> float:
    """How much of the bandwidth (bytes a second, of all nodes) streams beside training."""
    gbps = order.spec.stream_gbps_max
    allowed = inf if gbps is None else gbps * 1e9 / 8 * len(source.node_ids())
    return min(STREAM_SHARE, allowed / bandwidth)


def _plan_by_count(order: JobOrder, active: Roster, leaving: frozenset[str], barred: frozenset[str]) -> Plan | NoPlan:
    """With spares in the place of what goes, as many as there are; where no layout is known for so many, with fewer."""
    staying = tuple(member for member in active.members if member.node_id not in leaving)
    members = set(active.node_ids())
    spares = [member for member in order.spares if member.node_id not in members | leaving | barred]
    free = list(dict.fromkeys(member.node_id for member in spares))[: len(members & leaving)]
    for taken in range(len(free), 0, -1):
        come = tuple(member for member in spares if member.node_id in free[:taken])
        plan = _plan_of_nodes(order, leaving, staying, come)
        if isinstance(plan, Plan) and set(free[:taken]) <= {member.node_id for member in plan.members}:
            return plan
    return _plan_of_nodes(order, leaving, staying, ())


def _plan_of_nodes(
    order: JobOrder, leaving: frozenset[str], staying: tuple[Member, ...], come: tuple[Member, ...]
) -> Plan | NoPlan:
    nodes, without = len({member.node_id for member in (*staying, *come)}), f"without {listed(sorted(leaving))}"
    if nodes < order.spec.nodes.min:
        return NoPlan(f"{nodes} nodes stay {without}, the job needs {order.spec.nodes.min}")
    choice = next((choice for choice in order.layouts_by_count.choices if choice.nodes == nodes), None)
    if choice is None:
        return NoPlan(f"no layout is known for {nodes} nodes")
    if choice.layout is None:
        return NoPlan(f"nothing feasible on {nodes} nodes: {choice.reason}")
    layout, slots = choice.layout, len(staying) + len(come)
    if layout.world_size > slots:
        return NoPlan(f"{layout} needs {layout.world_size} slots, {slots} stay {without}")
    reason = f"layout for {nodes} nodes, made without the service: {choice.reason}"
    return Plan(layout, seat(layout, staying, come), "", reason)
