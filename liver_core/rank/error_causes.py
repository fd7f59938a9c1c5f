"""What an error of a rank says of what failed first: the store, or another rank, which this one only misses."""

from collections.abc import Iterator

from liver_core.handoff.messages import FailedPart, FailureCause
from liver_core.rank.store_exchange import StoreLost
from liver_core.worlds.groups import NoStore, misses_a_peer


def cause_of(error: BaseException | None) -> FailureCause | None:
    """By the error and those behind it. None where none tells: then it is this rank itself."""
    chain = list(_with_causes(error))
    if any(isinstance(each, StoreLost | NoStore) for each in chain):
        return FailureCause(FailedPart.STORE)
    if any(isinstance(each, TimeoutError) or misses_a_peer(each) for each in chain):
        return FailureCause(FailedPart.PEER)
    return None


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
