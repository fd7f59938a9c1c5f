"""Which GPUs a rank sees, and the settings with which it is not started."""

import pytest

from liver_core.gpu_environment import (
    GpuRefused,
    check_environment,
    check_job_environment,
    listed_gpus,
    rank_environment,
    visible_gpus,
)

GPUS = ("GPU-a", "GPU-b", "GPU-c")
LISTING = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0f0e0d0c-1111-2222-3333-444455556666)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1f0e0d0c-1111-2222-3333-444455556666)
  MIG 1g.10gb     Device  0: (UUID: MIG-2f0e0d0c-1111-2222-3333-444455556666)
"""


def test_each_rank_sees_its_own_gpu_first_and_those_of_its_peers_too():
    seen = [rank_environment(slot, GPUS)["CUDA_VISIBLE_DEVICES"] for slot in range(3)]
    assert seen == ["GPU-a,GPU-b,GPU-c", "GPU-b,GPU-c,GPU-a", "GPU-c,GPU-a,GPU-b"]


def test_more_slots_than_gpus_share_them_in_turn_and_a_node_without_any_sets_nothing():
    assert rank_environment(4, GPUS) == rank_environment(1, GPUS)
    assert rank_environment(2, ()) == {}


def test_torch_does_not_end_a_process_whose_peer_is_gone():
    assert rank_environment(0, GPUS)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_a_node_offers_the_gpus_that_its_agent_was_started_with_as_far_as_cuda_reads_them():
    assert visible_gpus({}, GPUS) == GPUS
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-c, GPU-a"}, GPUS) == ("GPU-c", "GPU-a")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, GPUS) == ("1",)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, GPUS) == ()


def test_gpus_are_listed_by_the_names_that_cuda_takes():
    assert listed_gpus(LISTING) == tuple(f"GPU-{at}f0e0d0c-1111-2222-3333-444455556666" for at in range(2))
    assert listed_gpus("No devices found.\n") == ()


@pytest.mark.parametrize(
    "name, value, change",
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "Unset it"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True", "expandable_segments:False"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:true", "expandable_segments:False"),
    ],
)
def test_a_setting_that_would_end_a_job_is_refused_by_name_with_what_to_change(name: str, value: str, change: str):
    with pytest.raises(GpuRefused, match=f"^{name}: .*{change}"):
        check_environment({name: value})


def test_harmless_values_of_the_same_settings_are_taken():
    check_environment({"CUDA_LAUNCH_BLOCKING": "0", "PYTORCH_ALLOC_CONF": "expandable_segments:False"})


@pytest.mark.parametrize(
    "name, value",
    [
        ("CUDA_VISIBLE_DEVICES", "0"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
        ("TORCH_NCCL_ENABLE_MONITORING", "1"),
        ("NCCL_RUNTIME_CONNECT", "1"),
    ],
)
def test_a_job_file_cannot_take_away_what_its_ranks_need(name: str, value: str):
    with pytest.raises(GpuRefused, match=rf"^environment\.{name}: .*Leave it out"):
        check_job_environment({name: value})
    if name != "CUDA_VISIBLE_DEVICES":
        needed = rank_environment(0, ("GPU-a",))
        assert needed[name] == "0"
        check_job_environment({name: needed[name]})
