"""What a process group meets at its store: one that stalls, one that starts late, and ranks that do not come."""

import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from liver_core.handoff import StoreAddress
from liver_core.layout import Member, ParallelLayout, Roster
from liver_core.worlds.groups import BringUpFailed, NoStore, connect_store, make_group
from liver_core.worlds.megatron import bring_up

HOST = "127.0.0.1"


def test_a_store_that_listens_and_does_not_answer_is_lost_long_before_one_that_may_still_start():
    with socket.create_server((HOST, 0)) as stalled:
        began = time.monotonic()
        with pytest.raises(NoStore, match="does not answer"):
            connect_store(StoreAddress(HOST, stalled.getsockname()[1]), timeout_s=40.0, answer_s=0.5)
    assert time.monotonic() - began < 20.0


def test_a_store_that_starts_late_is_waited_for():
    with socket.create_server((HOST, 0)) as reserved:
        port = reserved.getsockname()[1]
    started: list[dist.TCPStore] = []
    later = threading.Timer(
        1.5, lambda: started.append(dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False))
    )
    later.start()
    connect_store(StoreAddress(HOST, port), timeout_s=40.0, answer_s=10.0).set("key", "value")
    later.join()
    assert started[0].get("key") == b"value"


def test_a_group_that_is_not_complete_names_who_did_not_come():
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    with pytest.raises(BringUpFailed, match=r"within 1\.0 s on rank 4: rank 7, rank 9 did not come: "):
        make_group(store, (4, 7, 9), 4, name="test/absent", host=HOST, timeout_s=1.0, collective_s=1.0)


def test_a_world_of_which_not_all_say_where_they_train_names_who_is_silent():
    """A rank that stands still in the middle of bring-up has joined no group yet."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))
    store.set("job/2/gpu/2", "")
    layout = ParallelLayout(dp=4)
    roster = Roster("job", 2, layout, tuple(Member(f"n{rank}", 0) for rank in range(4)))
    with pytest.raises(BringUpFailed, match=r"on which GPU they train: rank 1, rank 3 did not come: "):
        bring_up(roster, 0, store, host=HOST, timeout_s=1.0)
