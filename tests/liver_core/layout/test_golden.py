"""Where every element of 40 dense worlds lies, written down once: who moves elements to other places breaks all jobs
that hand over between an older and a newer release. `--rewrite` writes the file anew, in which nothing may change.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from liver_core.layout import BucketRule, Manifest, ParallelLayout, resident_boxes, shard_ranges
from tests.liver_core.layout.models import gpt

GOLDEN = Path(__file__).with_name("golden.json")
SMALL = BucketRule(elements_max=4096)
DEFAULT = BucketRule(elements_max=3000, elements_max_per_dp=1500)
PADDED = BucketRule(elements_max=20_000, high_bandwidth_padding=True)
MODELS = {
    "plain": gpt(),
    "small buckets": gpt(rule=SMALL),
    "tied": gpt(tied=True, gated=False, rule=SMALL),
    "twelve layers": gpt(layers=12, hidden=24, heads=4, groups=2, ffn=36, vocab=132, rule=DEFAULT),
    "padded": gpt(layers=6, tied=True, rule=PADDED),
}
LAYOUTS = {
    "plain": "TP1 DP2 DP3 TP2 TP4 PP2 PP4 TP2xPP2xDP2 PP2xVPP2 CP2 DP2xCP2",
    "small buckets": "TP1 DP2 DP4 TP2xDP2 PP2xDP3 TP2xPP2xDP2xCP2 PP2xDP2xVPP2 DP64",
    "tied": "TP1 DP5 TP2 PP2 PP2xDP2 TP2xPP4 PP2xVPP2xDP2 DP128",
    "twelve layers": "TP1 TP2 DP3xCP2 PP3 PP6xDP2 PP2xVPP3 TP2xPP2xDP2xVPP2 DP7",
    "padded": "TP1 DP2 PP3xDP2 TP4xPP2 PP3xVPP2xDP3",
}
CASES = [f"{model} {layout}" for model, layouts in LAYOUTS.items() for layout in layouts.split()]


def lines(manifest: Manifest, layout: ParallelLayout) -> Iterator[str]:
    """Of each rank its parts of buckets, of parameters and of global tensors, each with its place in the region."""
    for rank in range(layout.world_size):
        owned = shard_ranges(manifest, layout, rank)
        yield f"rank {rank}: {owned.region_numel}"
        for it in owned.buckets:
            name = f"bucket {it.buffer.chunk} {it.index}"
            yield f"{name}: {it.start} {it.stop} of {it.padded_numel} at {it.region_offset}"
        for part in owned.parameters:
            yield f"{part.name} {part.tensor}: {part.param_start} {part.param_stop} at {part.region_offset}"
        for held in resident_boxes(manifest, layout, rank):
            yield f"{held.parameter} {held.box.start} {held.box.stop} at {held.offset}"


def digest(case: str) -> str:
    """Of all lines of a case, which is named by its model and its layout."""
    model, layout = case.rsplit(" ", 1)
    found = hashlib.sha256()
    for line in lines(MODELS[model], ParallelLayout.parse(layout)):
        found.update(f"{line}\n".encode())
    return found.hexdigest()


def test_there_are_forty_worlds(request: pytest.FixtureRequest):
    if request.config.getoption("--rewrite"):
        GOLDEN.write_text(json.dumps({case: digest(case) for case in CASES}, indent=1) + "\n")
    assert len(CASES) == 40 and list(json.loads(GOLDEN.read_text())) == CASES


@pytest.mark.parametrize("case", CASES)
def test_every_element_lies_where_it_did(case: str):
    assert digest(case) == json.loads(GOLDEN.read_text())[case]
