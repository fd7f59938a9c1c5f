"""Where every element of a job's state lives: parallel layouts, rosters, the manifest, ZeRO-1 shards and boxes.

Pure: standard library only. Checked in tests against Megatron-Core's own rank order and optimizer buffers.
"""

from liver_core.layout.boxes import Box, flat_range_to_boxes
from liver_core.layout.canonical import canonical_json, digest_of
from liver_core.layout.errors import LayoutError
from liver_core.layout.fit import check_fits
from liver_core.layout.local import LocalParameter, local_parameters, stage_parameters
from liver_core.layout.manifest import BucketRule, Manifest, ParameterSpec, Place, StateKind
from liver_core.layout.pairs import paired_parameters
from liver_core.layout.parallel import Coordinates, ParallelLayout
from liver_core.layout.resident import ResidentBox, local_to_global_boxes, resident_boxes
from liver_core.layout.roster import Member, Roster
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
    "ParallelLayout",
    "ParameterShard",
    "ParameterSpec",
    "Place",
    "RankShards",
    "ResidentBox",
    "Roster",
    "StateKind",
    "canonical_json",
    "check_fits",
    "digest_of",
    "flat_range_to_boxes",
    "local_parameters",
    "local_to_global_boxes",
    "paired_parameters",
    "region_numel",
    "resident_boxes",
    "shard_ranges",
    "stage_parameters",
]
