"""Manifests: validation, canonical form, digests, and whether a model fits a layout."""

import copy
from dataclasses import replace

import pytest
from hypothesis import given, settings

from liver_core.layout import (
    BucketRule,
    LayoutError,
    Manifest,
    MessageError,
    ParallelLayout,
    ParameterSpec,
    StateKind,
    canonical_json,
    check_fits,
    decode,
    from_json,
    to_json,
)
from tests.liver_core.layout.models import KINDS, gpt, manifests, spec


@settings(max_examples=20, deadline=None)
@given(manifest=manifests())
def test_a_manifest_comes_back_from_json_text_with_the_same_digest(manifest):
    after = decode(Manifest, canonical_json(to_json(manifest)))
    assert after == manifest
    assert hash(after) == hash(manifest)
    assert after.digest() == manifest.digest()


def test_a_copied_manifest_is_built_anew():
    manifest = gpt()
    again = copy.deepcopy(manifest)
    assert again == manifest
    assert hash(again) == hash(manifest)
    constructor, arguments = manifest.__reduce__()
    assert constructor(*arguments) == manifest


def test_the_order_in_which_parameters_are_given_does_not_matter():
    manifest = gpt()
    shuffled = Manifest(manifest.parameters[::-1], manifest.num_layers, manifest.kinds, manifest.bucket_rule)
    assert shuffled == manifest
    assert shuffled.digest() == manifest.digest()


def test_every_field_changes_the_digest():
    manifest = gpt()
    changed = [
        gpt(vocab=256),
        gpt(gated=False),
        gpt(rule=BucketRule(elements_max=100)),
        gpt(rule=BucketRule(elements_max=100, elements_max_per_dp=50)),
        replace(manifest, kinds=KINDS[:2]),
        gpt(tied=True),
    ]
    assert len({each.digest() for each in [manifest, *changed]}) == len(changed) + 1


def test_the_same_digest_is_computed_on_every_machine_and_python():
    found = Manifest((spec("w", (4, 2), 0, place="first"),), 0, KINDS[:1])
    assert found.digest() == "8c7b0ca98e73a78bc430edc661b5066a512acec0fd73ef63026fda58b5a734a3"


@pytest.mark.parametrize("value", [0.5, {"a": [1, {"b": 0.5}]}, [1, (2, float("nan"))], {"a": (0.0,)}])
def test_canonical_json_refuses_floats_wherever_they_are(value):
    with pytest.raises(TypeError, match="no floats"):
        canonical_json(value)


def test_canonical_json_is_ascii_sorted_and_without_spaces():
    assert canonical_json({"b": [1, None, True], "a": "\u00fc"}) == '{"a":"\\u00fc","b":[1,null,true]}'


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: spec("", (1,)), "name"),
        (lambda: spec("w", ()), "shape: must have 1 to 8 dims"),
        (lambda: spec("w", (3, 0)), "shape: every dim"),
        (lambda: spec("w", (3,), 1, layer=0), "tp_dim: 1 is not a dim"),
        (lambda: spec("w", (3,), None, blocks=2, layer=0), "blocks: must be 1"),
        (lambda: spec("w", (3,), 0, blocks=2, layer=0), "blocks: 2 blocks do not divide dim 0 of 3"),
        (lambda: spec("w", (3, 4), 1, blocks=2, layer=0), "blocks: 2 blocks need tp_dim 0, is 1"),
        (lambda: spec("w", (3,), place="middle"), "place: must be one of first, layer, last"),
        (lambda: spec("w", (3,), place="first", layer=2), "layer: 2 does not go with first"),
        (lambda: spec("w", (3,), place="layer"), "layer: -1 does not go with layer"),
        (lambda: spec("w", (3,), layer=0, order=-1), "order: must not be negative, is -1"),
        (lambda: spec("w", (1,) * 9, layer=0), "shape: must have 1 to 8 dims"),
        (lambda: spec("w", (3,), -1, layer=0), "tp_dim: -1 is not a dim"),
        (lambda: spec("w", (3,), 0, blocks=0, layer=0), "blocks: must be at least 1, is 0"),
        (lambda: spec("w", (3,), 0, unit=0, layer=0), "unit: must be at least 1, is 0"),
        (lambda: spec("w", (3,), layer=-2), "layer: -2 does not go with layer"),
        (
            lambda: ParameterSpec("w", (3,), "", None, 1, "first", -1, 0),
            "dtype: must be one of float32, bfloat16, is ''",
        ),
        (lambda: spec("w", (3,), place="first", tied_to="x"), "tied_to: needs place last"),
    ],
)
def test_an_impossible_parameter_is_refused_by_name(make, text):
    with pytest.raises(LayoutError, match=r"^parameter (w|\(unnamed\)): ") as error:
        make()
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("parameters", "num_layers", "text"),
    [
        ([], 1, "parameters: must be 1 to"),
        ([spec("w", (3,), layer=0), spec("w", (3,), layer=0, order=1)], 1, "parameters: w appears 2 times"),
        ([spec("a", (3,), layer=0), spec("b", (3,), layer=0)], 1, "order: "),
        ([spec("w", (3,), layer=1)], 1, "parameter w: layer: 1 of only 1 layers"),
        ([spec("w", (3,), place="first")], -1, "num_layers: must not be negative, is -1"),
        ([spec("a", (3,), layer=0), spec("b", (3,), place="last", tied_to="a")], 1, "must be on the first stage"),
        ([spec("a", (4,), place="first"), spec("b", (3,), place="last", tied_to="a")], 1, "with the same shape"),
        ([spec("a", (4,), 0, place="first"), spec("b", (4,), place="last", tied_to="a")], 1, "same shape and split"),
        (
            [spec("a", (4,), 0, place="first"), spec("b", (4,), 0, blocks=2, place="last", tied_to="a")],
            1,
            "same shape and split",
        ),
        ([spec("b", (3,), place="last", tied_to="gone")], 1, "'gone' is not in the manifest"),
    ],
)
def test_an_impossible_manifest_is_refused(parameters, num_layers, text):
    with pytest.raises(LayoutError) as error:
        Manifest(tuple(parameters), num_layers, KINDS)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: StateKind("", "float32"), "kind.name: must not be empty"),
        (lambda: StateKind("m", "int8"), "kind m.dtype: must be one of float32, bfloat16, parameter, is 'int8'"),
        (lambda: replace(gpt(), kinds=()), "kinds: must name at least one kind of state"),
        (lambda: replace(gpt(), kinds=(*KINDS, KINDS[0])), "kinds: master appears 2 times"),
        (lambda: gpt().parameter("gone"), "parameter: 'gone' is not in the manifest"),
    ],
)
def test_kinds_of_state_have_different_names_and_a_dtype_and_parameters_are_found_by_name(make, complaint):
    with pytest.raises(LayoutError) as error:
        make()
    assert str(error.value) == complaint


def test_the_smallest_and_the_widest_parameters_and_buckets_are_accepted():
    assert spec("w", (1,) * 8, layer=0).numel == 1
    rule = BucketRule(align_elements=1, end_multiple=1, elements_max=1)
    assert rule.elements_max_at(4) == 1
    assert BucketRule(elements_max=100, elements_max_per_dp=30).elements_max_at(4) == 120
    assert BucketRule().elements_max_at(4) is None


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        ({"align_elements": 0}, "bucket_rule.align_elements"),
        ({"align_elements": 64, "end_multiple": 100}, "bucket_rule.end_multiple"),
        ({"align_elements": 1, "end_multiple": 0}, "bucket_rule.end_multiple"),
        ({"elements_max": 0}, "bucket_rule.elements_max"),
        ({"elements_max_per_dp": 1}, "bucket_rule.elements_max_per_dp"),
        ({"elements_max": 1, "elements_max_per_dp": -1}, "bucket_rule.elements_max_per_dp"),
    ],
)
def test_an_impossible_bucket_rule_is_refused(rule, field):
    with pytest.raises(LayoutError) as error:
        BucketRule(**rule)
    assert error.value.field == field


def test_a_misspelt_field_in_json_is_not_passed_over():
    data = to_json(gpt())
    data["parameters"][2]["blokcs"] = 1
    with pytest.raises(MessageError, match=r"^parameters\[2\]\.blokcs: is not a field of this message"):
        from_json(Manifest, data)


@pytest.mark.parametrize(
    ("layout", "field", "text"),
    [
        ("PP3", "num_layers", "4 layers do not divide into pp*vpp = 3*1"),
        ("PP2xVPP3", "num_layers", "2*3"),
        ("TP3", "tp", "3 does not cut dim 0 of embedding.word_embeddings.weight: 128"),
        ("TP8", "tp", "linear_qkv.weight: 64 indices are not a multiple of blocks*tp*unit = 1*8*16"),
        ("TP2xDP2xEP2", "ep", "experts"),
    ],
)
def test_a_layout_that_cuts_unevenly_is_refused_with_the_numbers(layout, field, text):
    with pytest.raises(LayoutError) as error:
        check_fits(gpt(), ParallelLayout.parse(layout))
    assert error.value.field == field
    assert text in error.value.rule


def test_a_model_without_layers_runs_without_a_pipeline_only():
    manifest = Manifest((spec("w", (4,), 0, place="first"),), 0, KINDS)
    check_fits(manifest, ParallelLayout(tp=4))
    with pytest.raises(LayoutError, match=r"^pp: 2 stages need layers"):
        check_fits(manifest, ParallelLayout(pp=2))


@pytest.mark.parametrize("layout", ["TP1", "TP4xPP4xDP7xCP3", "TP2xPP2xVPP2", "DP13"])
def test_a_layout_that_cuts_evenly_is_accepted(layout):
    check_fits(gpt(), ParallelLayout.parse(layout))


def test_the_dtype_of_a_kind_is_that_of_all_elements_or_that_of_each_parameter():
    wide, narrow = spec("w", (4,), layer=0), replace(spec("n", (4,), layer=0, order=1), dtype="bfloat16")
    held = Manifest((wide, narrow), 1, (*KINDS, StateKind("grad", "parameter")))
    assert (held.gradient_dtype(wide), held.gradient_dtype(narrow)) == ("float32", "bfloat16")
    assert (held.element_bytes(wide), held.element_bytes(narrow)) == (16, 14)
    assert held.element_bytes(narrow, ("grad",)) == 2
    assert Manifest((narrow,), 1, KINDS).gradient_dtype(narrow) == "float32", "where no kind says it"
