"""Reads the event files of one run with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


class Run:
    """What TensorBoard would show of a run."""

    def __init__(self, folder: Path) -> None:
        self._found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        self._found.Reload()

    def names(self) -> set[str]:
        return set(self._found.Tags()["scalars"])

    def steps(self, name: str) -> list[int]:
        return [event.step for event in self._found.Scalars(name)] if name in self.names() else [0]

    def values(self, name: str) -> list[float]:
        return [event.value for event in self._found.Scalars(name)]

    def times(self, name: str) -> list[float]:
        return [event.wall_time for event in self._found.Scalars(name)]


def read_run(folder: Path) -> Run:
    """All files of the folder, in the order of their names."""
    return Run(folder)
