"""The memory that one handoff takes on one rank, counted at every allocation and release.

Device and host memory are counted separately, even on a machine where they are the same memory.
"""


class MemoryAccount:
    """Bytes that a handoff may take and has taken, beyond what the rank used before it. Budgets and peaks go into
    `measures`. `device_bytes_max`: None without a limit. `host_bytes_max`: 0 where nothing may wait in host memory."""

    def __init__(self, measures: dict[str, float]) -> None:
        self._measures = measures
        self.device_bytes_max: int | None = None
        self.host_bytes_max = 0
        self.device_bytes = 0
        self.host_bytes = 0

    def report_budgets(self) -> None:
        """Put the budgets into the measures."""
        if self.device_bytes_max is not None:
            self._measures["extra_bytes_budget"] = float(self.device_bytes_max)
        if self.host_bytes_max:
            self._measures["host_bytes_budget"] = float(self.host_bytes_max)
            self._peak("host_bytes_peak", 0)

    def take(self, device_bytes: int = 0, host_bytes: int = 0) -> None:
        """Add to what is taken. Negative numbers are releases."""
        self.device_bytes += device_bytes
        self.host_bytes += host_bytes
        self._peak("extra_bytes_peak", self.device_bytes)
        if self.host_bytes:
            self._peak("host_bytes_peak", self.host_bytes)

    def pass_through(self, device_bytes: int) -> None:
        """Count a transient peak: memory that was taken and released again."""
        self.take(device_bytes)
        self.take(-device_bytes)

    def _peak(self, name: str, taken: int) -> None:
        self._measures[name] = max(self._measures.get(name, 0.0), float(taken))
