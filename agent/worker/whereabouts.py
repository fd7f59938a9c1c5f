"""Says where the main thread of a rank is: in which function, and whether that waits for other ranks.

Another thread asks, so that it is known of a main thread that stands still.
"""

import sys
import sysconfig
import threading
from types import FrameType

WAITS = (
    "torch.distributed.",
    "torch.cuda.",
    "megatron.core.distributed.",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.tensor_parallel.mappings",
    "liver_core.device.",
    "liver_core.rank.",
)
"""Modules whose functions wait for other ranks, or for a device that does."""
FRAMES_MAX = 256
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def main_thread_at() -> tuple[str, bool]:
    """The function in which the main thread is, with file and line, and whether it waits for other ranks."""
    identity = threading.main_thread().ident
    frame = sys._current_frames().get(identity) if identity is not None else None
    return ("", False) if frame is None else place_of(frame)


def place_of(frame: FrameType) -> tuple[str, bool]:
    """The same of a thread whose innermost frame this is. Of several functions that called each other it is the
    innermost that is no part of Python or of an installed package, where there is one."""
    waits = f"{frame.f_globals.get('__name__', '')}.".startswith(WAITS)
    found: FrameType | None = frame
    for _ in range(FRAMES_MAX):
        if found is None or not found.f_code.co_filename.startswith(_INSTALLED):
            break
        found = found.f_back
    shown = frame if found is None or waits else found
    code = shown.f_code
    return f"{code.co_name} ({code.co_filename.rsplit('/', 1)[-1]}:{shown.f_lineno})", waits
