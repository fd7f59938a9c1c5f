"""The demo's view of its job, polled from the service. Steps that were seen once are kept."""

from dataclasses import dataclass, field
from typing import Any

from deploy.local.api import Api

REREAD_STEPS = 8
"""Rows may arrive out of order, since several agents report: the last few are fetched again."""


@dataclass(slots=True)
class Tracker:
    """One job. `steps`: step -> row, the newest generation's where a step was made twice."""

    api: Api
    job_id: str
    job: dict[str, Any] = field(default_factory=dict)
    handoffs: list[dict[str, Any]] = field(default_factory=list)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)

    def refresh(self) -> None:
        """Fetch everything that may have changed."""
        self.job = self.api.get(f"/api/v1/jobs/{self.job_id}")
        self.handoffs = self.api.handoffs(self.job_id)
        for row in self.api.steps(self.job_id, after=max(0, self.last_step - REREAD_STEPS)):
            known = self.steps.get(row["step"])
            if known is None or row["generation"] >= known["generation"]:
                self.steps[row["step"]] = row

    @property
    def last_step(self) -> int:
        """The highest step seen."""
        return max(self.steps, default=0)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Members of the active world, in rank order."""
        return tuple(self.job.get("nodes", ()))

    def measured(self, *, after_generation: int) -> list[dict[str, Any]]:
        """Handoffs above a generation that are active and fully measured, five steps after their cutover included."""
        return [
            item
            for item in self.handoffs
            if item["state"] == "active"
            and item["generation"] > after_generation
            and item["pause_s"] is not None
            and item["lost_s"] is not None
        ]

    def open_handoff(self) -> dict[str, Any] | None:
        """The handoff under way, if there is one."""
        ended = ("active", "aborted", "broken")
        return next((item for item in reversed(self.handoffs) if item["state"] not in ended), None)

    def why_not(self) -> str:
        """State and reason of the job and of its last handoff, for an error message."""
        text = f"the job is {self.job.get('state')}: {self.job.get('reason')}"
        if not self.handoffs:
            return text
        last = self.handoffs[-1]
        return f"{text}; the last handoff to {last['to']} is {last['state']}: {last['reason'] or 'no reason given'}"
