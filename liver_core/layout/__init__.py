"""Where every element of a job's state lives: parallel layouts, rosters, the manifest, ZeRO-1 shards and boxes.

Pure: the standard library, and pydantic in the codec. Checked in tests against Megatron-Core's own rank order and
optimizer buffers.
"""

from liver_core.layout.boxes import Box, flat_range_to_boxes
from liver_core.layout.canonical import canonical_json, digest_of
from liver_core.layout.codec import MessageError, decode, from_json, to_json
from liver_core.layout.copies import copies_of, copy_counts
from liver_core.layout.fit import check_fits
from liver_core.layout.layout_error import LayoutError
from liver_core.layout.local_parameters import LocalParameter, local_parameters, stage_of_layer, stage_parameters
from liver_core.layout.manifest import BucketRule, Manifest, ParameterSpec, Place, StateKind, WholeSpec
from liver_core.layout.pairs import paired_parameters
from liver_core.layout.parallel import Coordinates, ParallelLayout
from liver_core.layout.resident import ResidentBox, local_to_global_boxes, resident_boxes
from liver_core.layout.roster import Member, Members, Roster, check_members
from liver_core.layout.shards import BucketShard, ParameterShard, RankShards, region_numel, shard_ranges

__all__ = [
    "Box",
    "BucketRule",
    "BucketShard",
    "Coordinates",
    "LayoutError",
    "LocalParameter",
    "Manifest",
    "Member",
    "Members",
    "MessageError",
    "ParallelLayout",
    "ParameterShard",
    "ParameterSpec",
    "Place",
    "RankShards",
    "ResidentBox",
    "Roster",
    "StateKind",
    "WholeSpec",
    "canonical_json",
    "check_fits",
    "check_members",
    "copies_of",
    "copy_counts",
    "decode",
    "digest_of",
    "flat_range_to_boxes",
    "from_json",
    "local_parameters",
    "local_to_global_boxes",
    "paired_parameters",
    "region_numel",
    "resident_boxes",
    "shard_ranges",
    "stage_of_layer",
    "stage_parameters",
    "to_json",
]
