"""What a checkpoint's files are called, for those that write, load and export them. Without torch and Megatron."""

from dataclasses import dataclass

COMPLETE_FILE = "metadata.json"
TENSORS_FILE = ".metadata"
"""Which file holds which part of which tensor."""
COMMON_FILE = "common.pt"
"""Everything that is not cut into shards."""
MEGATRON_FILES = (COMPLETE_FILE, TENSORS_FILE, COMMON_FILE)
SMALL_STATE_FILE = "liver_small_state.json"
ARGUMENTS = "megatron_arguments"
"""Their name among what is not cut into shards."""


@dataclass(frozen=True, slots=True)
class LeaseStanding:
    """Of one rank: whether it holds a step lease, and whether it was asked to end."""

    has_lease: bool
    ends: bool
