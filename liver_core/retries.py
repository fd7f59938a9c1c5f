"""How long to wait before the next try of something that failed, and of a handoff. Pure."""

RETRY_FIRST_S, RETRY_MAX_S = 0.5, 10.0
"""Between handoffs that agents open by themselves while nodes are about to go: each try burns a generation."""
_DOUBLED_MOST = 60
"""So many doublings reach every limit. A float does not hold more than 1,023."""


def doubled_s(first_s: float, times: int, most_s: float) -> float:
    """Seconds: `first_s` doubled so many `times`, but not over `most_s`."""
    return min(most_s, first_s * 2.0 ** min(times, _DOUBLED_MOST))


def retry_in_s(failures: int) -> float:
    """Seconds until the next handoff may be opened after this many `failures` in a row, the last one included."""
    return doubled_s(RETRY_FIRST_S, failures, RETRY_MAX_S)
