"""What can wait lets pass what cannot, and no longer than stated."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from service.pressing import Pressing

WITHIN_S = 20.0


def test_nobody_pauses_while_nothing_presses() -> None:
    pressing = Pressing()
    with pressing.at_work():
        pass
    pause, began = pressing.let_pass(WITHIN_S), time.monotonic()
    pause()
    assert time.monotonic() - began < WITHIN_S / 2
    assert not pressing.is_on


def test_a_pause_ends_with_the_last_of_what_presses() -> None:
    pressing, has_begun = Pressing(), threading.Event()

    def work() -> bool:
        has_begun.set()
        pressing.let_pass(WITHIN_S)()
        return pressing.is_on

    with ThreadPoolExecutor(1) as pool:
        with pressing.at_work():
            with pressing.at_work():
                waiting = pool.submit(work)
                assert has_begun.wait(WITHIN_S)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.05)
        assert waiting.result(timeout=WITHIN_S) is False


def test_one_piece_of_work_pauses_for_so_long_in_all_where_something_presses_all_the_time() -> None:
    pressing, within_s = Pressing(), 0.1
    with pressing.at_work():
        pause, began = pressing.let_pass(within_s), time.monotonic()
        pause()
        paused_s = time.monotonic() - began
        for _ in range(100):
            pause()
        assert within_s <= paused_s
        assert time.monotonic() - began < paused_s + within_s, "it pauses once"
        assert pressing.is_on


def test_what_fails_presses_no_longer() -> None:
    pressing = Pressing()
    with pytest.raises(ValueError), pressing.at_work():
        raise ValueError
    assert not pressing.is_on
