"""What a rank takes beside its state, and what is left of a device for a handoff, in round numbers."""

from liver_core.memory.overheads import DeviceOverheads, default_budget

ROUND = DeviceOverheads(context=1, workspaces=1, nccl_per_world=3_000, certificate=200, landing=6, relay=4)


def test_a_world_of_two_ranks_has_communicators_and_one_of_one_has_none():
    assert [ROUND.nccl(ranks) for ranks in (1, 2, 8)] == [0, 3_000, 3_000]


def test_what_is_left_of_a_device_for_a_handoff_by_hand():
    # 6464 / 64 is 101; of 6400 to 6463 bytes 100 are left to the allocator.
    assert default_budget(10_000, 6_464, 2, ROUND) == 10_000 - 3_000 - 200 - 10 - 101
    assert default_budget(10_000, 6_463, 2, ROUND) == 10_000 - 3_000 - 200 - 10 - 100
    assert default_budget(10_000, 6_400, 1, ROUND) == 10_000 - 200 - 10 - 100
    assert default_budget(311, 6_400, 1, ROUND) == 1
    assert default_budget(310, 6_400, 1, ROUND) == default_budget(309, 6_400, 1, ROUND) == 0


def test_without_figures_of_a_device_the_usual_ones_are_taken():
    # The certificate: five tensors of 4 x 2^20 words of 8 bytes. The landing place: 32 x 2^20 bytes. The relay: 0.5 GB.
    assert default_budget(3 * 10**9, 64, 1) == 3 * 10**9 - 5 * 4 * 2**20 * 8 - 32 * 2**20 - 5 * 10**8 - 1
    assert default_budget(3 * 10**9, 64, 2) == default_budget(3 * 10**9, 64, 1) - 2 * 10**9
