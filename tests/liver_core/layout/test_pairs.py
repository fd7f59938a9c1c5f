"""Parameters named as paired are cut between pairs only, whatever the layout; the usual ones are named."""

from hypothesis import HealthCheck, given, settings

from liver_core.layout import BucketRule, Manifest, ParallelLayout, paired_parameters, resident_boxes
from tests.liver_core.layout.models import CHUNKS, KINDS, TENSOR_PARALLEL, gpt, layouts, manifests, spec

BOUNDED = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LAYOUTS = layouts(chunks=CHUNKS, tps=TENSOR_PARALLEL)


@BOUNDED
@given(manifest=manifests(), layout=LAYOUTS, other=LAYOUTS)
def test_no_box_of_a_paired_parameter_has_half_a_pair(manifest, layout, other):
    paired = paired_parameters(manifest, layout, other)
    for one in (layout, other):
        for rank in range(one.world_size):
            for resident in resident_boxes(manifest, one, rank):
                if resident.parameter in paired:
                    begin, width = resident.box.start[-1], resident.box.stop[-1] - resident.box.start[-1]
                    row = manifest.parameter(resident.parameter).shape[-1]
                    assert begin % 2 == width % 2 == row % 2 == resident.offset % 2 == 0


def test_all_parameters_of_a_usual_model_are_paired():
    manifest = gpt(layers=6, hidden=48, heads=8, groups=4)
    layouts_of_demo = [ParallelLayout.parse(text) for text in ("TP2xPP2", "PP3", "TP2xDP2", "DP4", "TP4", "DP3")]
    assert paired_parameters(manifest, *layouts_of_demo) == {spec.name for spec in manifest.parameters}


def test_an_odd_row_is_not_paired_and_does_not_stop_the_others():
    shapes = {"a": (4, 6), "b": (4, 5), "c": (7,), "d": (8,)}
    specs = tuple(spec(name, shape, place="first", order=at) for at, (name, shape) in enumerate(shapes.items()))
    manifest = Manifest(specs, 1, KINDS, BucketRule())
    assert paired_parameters(manifest, ParallelLayout.parse("DP2")) == {"a", "d"}


def test_a_row_that_tensor_parallelism_cuts_into_odd_parts_is_not_paired():
    manifest = Manifest((spec("w", (4, 6), 1, place="first"),), 1, KINDS, BucketRule())
    assert paired_parameters(manifest, ParallelLayout.parse("DP2")) == {"w"}
    assert not paired_parameters(manifest, ParallelLayout.parse("TP2"))
    assert not paired_parameters(manifest, ParallelLayout.parse("DP2"), ParallelLayout.parse("TP2"))


def test_nothing_is_paired_where_buckets_are_cut_after_an_odd_number_of_elements():
    manifest = Manifest((spec("w", (4, 6), place="first"),), 1, KINDS, BucketRule(align_elements=2, end_multiple=2))
    assert paired_parameters(manifest, ParallelLayout.parse("DP4")) == {"w"}
    assert not paired_parameters(manifest, ParallelLayout.parse("DP8"))
