"""The memory that one handoff takes on one rank, counted at every allocation and release.

Device and host memory are counted separately, even on a machine where they are the same memory.
"""


class MemoryAccount:
    """Bytes that a handoff has taken beyond what the rank used before it. Peaks go into `measures`."""

    def __init__(self, measures: dict[str, float]) -> None:
        self._measures = measures
        self.device_bytes = 0
        self.host_bytes = 0

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
