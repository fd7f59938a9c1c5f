"""What ranks that share a GPU do instead of gloo, which reads a GPU's memory as the host's; here on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cluster.real_ranks import run_ranks

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


def test_tensors_that_are_gathered_at_once_are_gathered_by_collectives_of_their_own():
    assert run_ranks(_gather_at_once, 2) == [([[0.0, 1.0], [10.0, 11.0]], 2)] * 2


def test_a_group_whose_ranks_have_the_cpu_only_gathers_them_in_one():
    assert run_ranks(_gather_at_once, 2, False) == [([[0.0, 1.0], [10.0, 11.0]], 1)] * 2


def test_what_is_sent_and_received_passes_through_copies_in_host_memory():
    sent = [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]
    assert run_ranks(_exchange, 2) == [(sent[1], sent[1]), (sent[0], sent[0])]


def _group(rank: int, port: int, shares_gpu: bool = True) -> Any:
    from liver_core.handoff.messages import StoreAddress
    from liver_core.worlds.groups import OnDevice, connect_store, make_group

    store = connect_store(StoreAddress("127.0.0.1", port), timeout_s=20)
    limits = {"timeout_s": 20.0, "collective_s": 20.0}
    on_device = OnDevice() if shares_gpu else None
    return make_group(store, range(2), rank, name="shared", host="127.0.0.1", on_device=on_device, **limits)


def _exchange(rank: int, port: int) -> tuple[list[float], list[float]]:
    """What came, both ways at once as pipeline stages do, and then from anybody."""
    group = _group(rank, port)
    ours, theirs, again = torch.arange(3) + 10.0 * rank, torch.zeros(3), torch.zeros(3)
    send = dist.P2POp(dist.isend, ours, group=group, group_peer=1 - rank)
    receive = dist.P2POp(dist.irecv, theirs, group=group, group_peer=1 - rank)
    works = dist.batch_isend_irecv([send, receive])
    ours += 100  # A copy was sent.
    assert theirs.tolist() == [0.0] * 3, "it comes when somebody waits"
    for work in works:
        work.wait()
    work = dist.isend(ours - 100, group=group, group_dst=1 - rank)
    assert work is not None
    assert dist.recv(again, group=group) == 1 - rank
    work.wait()
    return theirs.tolist(), again.tolist()


def _gather_at_once(rank: int, port: int, shares_gpu: bool = True) -> tuple[list[list[float]], int]:
    """What was gathered, and how many collectives that took."""
    group = _group(rank, port, shares_gpu)
    backend = group._get_backend(torch.device("cpu"))
    before = backend._get_sequence_number_for_group()
    wholes = [torch.zeros(2), torch.zeros(2)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for at, whole in enumerate(wholes):
            dist.all_gather_into_tensor(whole, torch.tensor([rank + 10.0 * at]), group=group)
    manager.wait()
    return [whole.tolist() for whole in wholes], backend._get_sequence_number_for_group() - before
