"""Where a thread of a rank is, as people and the service are told."""

import sys
import threading
from types import FrameType
from typing import Any

from agent.worker.whereabouts import main_thread_at, place_of


def frame_in(code: str, module: str, file: str) -> FrameType:
    """The innermost frame of a function of this module."""
    names: dict[str, Any] = {"__name__": module, "sys": sys}
    exec(compile(code, file, "exec"), names)
    return names["here"]()


HERE = "def here():\n    return sys._getframe()\n"


def test_a_function_that_waits_for_other_ranks_is_told_from_one_of_the_job():
    assert place_of(frame_in(HERE, "torch.distributed.distributed_c10d", "/x/c10d.py")) == ("here (c10d.py:2)", True)
    assert place_of(frame_in(HERE, "megatron.core.distributed.buffer", "/x/buffer.py")) == ("here (buffer.py:2)", True)
    assert place_of(frame_in(HERE, "liver_core.rank.step_boundary", "/x/boundary.py")) == ("here (boundary.py:2)", True)
    assert place_of(frame_in(HERE, "my_job", "/home/me/my_job.py")) == ("here (my_job.py:2)", False)
    assert place_of(frame_in(HERE, "torch.distributedness", "/x/y.py"))[1] is False


def test_of_a_wait_in_pythons_own_library_the_function_that_called_it_is_named():
    names: dict[str, Any] = {"__name__": "threading", "sys": sys, "place_of": place_of}
    exec(compile("def wait():\n    return place_of(sys._getframe())\n", threading.__file__, "exec"), names)

    def reads_for_ever() -> tuple[str, bool]:
        return names["wait"]()

    at, waits = reads_for_ever()
    assert at.startswith("reads_for_ever (test_whereabouts.py:") and not waits


def test_the_main_thread_is_found_from_another_one():
    said: list[tuple[str, bool]] = []
    thread = threading.Thread(target=lambda: said.append(main_thread_at()))
    thread.start()
    thread.join(10)
    assert said[0][0].startswith("test_the_main_thread_is_found_from_another_one (")
