"""Moving state between two layouts: rank-local plans, their digest, bounds, placement.

Pure: standard library only. Nothing here moves a byte; a transport executes the runs of a plan.
"""

from liver_core.reshard.bounds import missing_bytes
from liver_core.reshard.plan import CopyRuns, PlanLimits, RankPlan, Transfer, plan_digest
from liver_core.reshard.plan_error import PlanError
from liver_core.reshard.planner import plan_rank
from liver_core.reshard.rescue import RescuePlan, Share, boxes_given, boxes_kept, plan_after_rescue, plan_rescue
from liver_core.reshard.seating import NodeSlots, place, seat

__all__ = [
    "CopyRuns",
    "NodeSlots",
    "PlanError",
    "PlanLimits",
    "RankPlan",
    "RescuePlan",
    "Share",
    "Transfer",
    "boxes_given",
    "boxes_kept",
    "missing_bytes",
    "place",
    "plan_after_rescue",
    "plan_digest",
    "plan_rank",
    "plan_rescue",
    "seat",
]
