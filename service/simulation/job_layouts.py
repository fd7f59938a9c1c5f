"""The layouts of a job file as candidates of a policy, with the planner's own rules and step times. Pure."""

from agent.protocol.jobfile import JobFile
from liver_core.layout.parallel import ParallelLayout
from service.planner.change_cost import ChangeCost, state_bytes
from service.planner.feasibility import candidates
from service.planner.step_time import StepTimes
from service.policy.types import Candidate

LAYOUTS_MAX = 512


def candidates_of(
    job: JobFile,
    *,
    slots_per_node: int,
    device: str,
    cost: ChangeCost,
    change_s: float | None = None,
    measured: tuple[tuple[str, float], ...] = (),
) -> tuple[Candidate, ...]:
    """The fastest layout for each number of nodes that the job allows. `change_s`: what every change costs; None: by
    the cost of the size of the job's state. `measured`: seconds of a step by layout, of those that ran."""
    times = StepTimes.of(job, measured, device)
    lost_s = cost.lost_s(state_bytes(job)) if change_s is None else change_s
    # Those that ran tell how the job cuts its experts; the one of most TP tells ETP where it is not as TP.
    in_use = max((ParallelLayout.parse(name) for name, _ in measured), key=lambda layout: layout.tp, default=None)
    found: dict[int, Candidate] = {}
    for nodes in range(job.nodes.min, min(job.nodes.max, LAYOUTS_MAX) + 1):
        layouts = candidates(job, nodes=nodes, slots=nodes * slots_per_node, history=(), in_use=in_use)
        for layout in layouts:
            used = -(-layout.world_size // slots_per_node)
            if used < job.nodes.min:
                continue
            estimate = times.of_layout(layout)
            best = found.get(used)
            if best is None or estimate.seconds < best.step_time_s:
                found[used] = Candidate(
                    str(layout),
                    used,
                    estimate.seconds,
                    job.global_batch * job.model.seq_length,
                    step_error=estimate.error,
                    is_measured=estimate.measured,
                    change_s=lost_s,
                )
    return tuple(found[nodes] for nodes in sorted(found))
