"""What the API says of the numbers of a step."""

from collections.abc import Collection
from datetime import datetime

from pydantic import BaseModel, Field

from service.metrics.tables import StepMetricsRow


class MetricsOut(BaseModel):
    """The numbers of one step, as the newest generation that made it says."""

    step: int
    generation: int
    at: datetime
    values: dict[str, float | None] = Field(description="By name. Null: not a number, or infinite.")

    @classmethod
    def of(cls, row: StepMetricsRow, names: Collection[str]) -> "MetricsOut":
        """From its row; of these names only, where there are any."""
        values = {name: value for name, value in row.numbers.items() if not names or name in names}
        return cls(step=row.step, generation=row.generation, at=row.at, values=values)
