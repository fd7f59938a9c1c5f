"""The groups of the next world, made beside the present one, and whether its communicators are still to be made.

A leaver has no part in the groups. But it takes part in the boundary at which the communicators are made, so it must
know of them.
"""

from __future__ import annotations

from collections.abc import Callable

from liver_core.handoff.messages import Order
from liver_core.rank.next_world import NextWorld
from liver_core.rank.prepare.cancellable import cancellable
from liver_core.rank.prepare.prepare_settings import PrepareSettings
from liver_core.worlds.groups import STORE_PATIENCE_S, connect_store
from liver_core.worlds.megatron import MegatronWorld, bring_up, retire

_COMMUNICATORS = "communicators"


def make_next_groups(
    made: NextWorld, settings: PrepareSettings, *, name: str, timeout_s: float, aborted: Callable[[], bool]
) -> None:
    """As a target, once all targets are there. `name`: what the groups are called by. Each is there within
    `timeout_s`."""
    assert made.target_rank is not None
    place = settings.place()

    def connect_groups() -> MegatronWorld:
        # Groups need a store client of their own: gloo keeps it, and the exchange must not wait behind it.
        store = connect_store(made.request.store, timeout_s=settings.bring_up_s, answer_s=STORE_PATIENCE_S)
        assert made.target_rank is not None
        return bring_up(
            made.request.target,
            made.target_rank,
            store,
            name=name,
            host=settings.host,
            timeout_s=timeout_s,
            collective_s=settings.collective_s,
            place=place,
        )

    made.world = cancellable(connect_groups, aborted, undo=retire, name="connecting the groups")
    made.lacks_communicators, made.connect_s = made.world.nccl is not None, settings.connect_s
    if made.target_rank == 0 and place.gpu:
        made.exchange.post(_COMMUNICATORS, made.lacks_communicators)


def knows_of_groups(request: Order, target_rank: int | None, settings: PrepareSettings) -> bool:
    """Whether a rank has a part in this. A leaver has where it trains on a GPU, as all ranks of a job or none do."""
    return target_rank is not None or (request.source is not None and bool(settings.place().gpu))


def learn_of_groups(made: NextWorld, deadline: float) -> None:
    """As a leaver."""
    made.lacks_communicators = bool(made.exchange.wait(_COMMUNICATORS, deadline))
