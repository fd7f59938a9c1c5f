"""What a handoff leaves after its cutover (old world, endpoints), and how it is freed once nothing needs it."""

from __future__ import annotations

from dataclasses import dataclass

from liver_core.device.threads import background
from liver_core.rank.active_world import ActiveWorld
from liver_core.rank.next_world import NextWorld
from liver_core.state.live_state import free
from liver_core.worlds.megatron import retire
from liver_core.worlds.released_storage import collect


@dataclass(slots=True)
class Retirement:
    """What a handoff leaves, kept until every rank of the new world has reported its first step."""

    handoff_id: str
    old: ActiveWorld | None
    following: NextWorld

    def free_in_background(self, *, after_s: float = 0.0) -> None:
        """Free endpoints, groups and memory of the old world. Nothing waits for it, but the garbage collection at its
        end stops all threads for some hundredths of a second."""
        background(self._free, name="retire", after_s=after_s).start()

    def _free(self) -> None:
        self.following.end_streams()
        self.following.end_rescue()
        if self.following.transport is not None:
            self.following.transport.close()
        if self.old is not None:
            retire(self.old.world)
            freed_bytes = free(self.old.live)
            if self.following.live is not None:
                self.following.live.kept_bytes = freed_bytes
            self.old.state = self.old.live = None  # type: ignore[assignment]
        self.old = None
        # Modules, hooks and optimizer form reference cycles, which keep the sockets and threads of the old groups.
        collect()
