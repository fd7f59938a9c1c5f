"""Certificates count each element of a source world as often as the target holds it, also of tied embeddings."""

from collections import Counter

from hypothesis import HealthCheck, given, settings

from liver_core.layout import Manifest, ParallelLayout, copies_of, copy_counts, resident_boxes
from tests.liver_core.layout.models import gpt, moe, worlds
from tests.liver_core.layout.oracle import element_ids

BOUNDED = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def held(manifest: Manifest, layout: ParallelLayout, *, first_only: bool) -> Counter[int]:
    """How many ranks hold each element; of copies all, or the first only."""
    ids, found = element_ids(manifest), Counter[int]()
    for rank in range(layout.world_size):
        for resident in resident_boxes(manifest, layout, rank):
            if not first_only or copies_of(manifest, layout, rank, resident.parameter)[0] == rank:
                box = resident.box
                found.update(ids[resident.parameter][tuple(map(slice, box.start, box.stop))].reshape(-1).tolist())
    return found


@BOUNDED
@given(drawn=worlds(2, ranks_max=12))
def test_the_first_copies_times_the_copies_of_the_target_are_all_that_the_target_holds(drawn):
    manifest, source, target = drawn
    ids, times = element_ids(manifest), copy_counts(manifest, target)
    owner = {element: name for name, whole in ids.items() for element in whole.reshape(-1).tolist()}
    once = held(manifest, source, first_only=True)
    assert set(once.values()) == {1} and len(once) == len(owner)
    assert held(manifest, target, first_only=False) == {element: times[owner[element]] for element in once}


def test_both_ends_of_a_pipeline_hold_a_tied_embedding_and_every_tensor_parallel_rank_a_norm():
    manifest, layout = gpt(tied=True), ParallelLayout.parse("TP2xPP2xDP2")
    assert copies_of(manifest, layout, 3, "embedding.word_embeddings.weight") == (3, 7)
    assert copies_of(manifest, layout, 3, "decoder.layers.0.input_layernorm.weight") == (2, 3)
    counts = copy_counts(manifest, layout)
    assert counts["output_layer.weight"] == counts["embedding.word_embeddings.weight"] == 2


def test_each_rank_of_etp_holds_what_it_does_not_cut_of_the_experts_that_it_has():
    manifest, layout = moe(bias=True), ParallelLayout.parse("TP2xDP4xEP2xETP2")
    name = "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc2.{}"
    # In a stage the ranks 0 and 1 have experts 0 and 1, 2 and 3 the others, and 4 to 7 the same once more.
    assert copies_of(manifest, layout, 6, name.format(3, "bias")) == (6, 7)
    assert copies_of(manifest, layout, 6, name.format(3, "weight")) == (6,)
    assert copy_counts(manifest, layout)[name.format(0, "bias")] == 2
