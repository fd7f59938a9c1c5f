"""Digests that were written down: releases that compute different ones of one value refuse to work together, so they
change only with what plans are made of."""

import pytest

from liver_core.layout import BucketRule, Manifest, Roster, canonical_json, to_json
from liver_core.reshard import plan_digest
from tests.liver_core.layout.models import gpt, roster

PLAIN = gpt()
RULE = BucketRule(elements_max=4096, elements_max_per_dp=8, high_bandwidth_padding=True)
TIED = gpt(tied=True, gated=False, rule=RULE)
FOUR = roster("TP2xPP2", generation=3, slots=2)
EIGHT = roster("TP1xPP4xDP2", generation=4, order=[5, 1, 2, 3, 4, 0, 7, 6])


@pytest.mark.parametrize(
    ("value", "digest"),
    [
        (PLAIN, "44990c6adeeb9c05ac3e99b534ac99243e534f248ae287a11f99d0655d3dd72b"),
        (TIED, "5c300b161f808d2ef9e9c2a81f06d37924dc576b4da9d48647624da8f1eb0c73"),
        (FOUR, "60ca662766719c6fb11d1be7dfd26c67bac6eb27bbbe78066935af5a8ef6b6ef"),
        (EIGHT, "a634318aaaa15fb3819efb2386446d4d399aa267b9d1c2f260db677c17d67b69"),
        (
            roster("TP2xPP2xCP2xVPP2", generation=2**31 - 1),
            "a48d03ae574d122600dbb50f49bdc85659f5bfb5eae90fbcb4061a0860b54f56",
        ),
    ],
)
def test_manifests_and_rosters_have_the_digests_that_were_written_down(value: Manifest | Roster, digest: str):
    assert value.digest() == digest


def test_plans_have_the_digests_that_were_written_down():
    assert plan_digest(PLAIN, FOUR, EIGHT) == "b02dba4f37f8e53c927b9eb780abf88c72b7174d11bfd3897a2a0af398e98541"
    assert plan_digest(TIED, EIGHT, FOUR) == "feefbe0ccbedff1fa42ed2414505525554640d233fbbf97ad018d4ec40327ab0"


def test_the_canonical_text_of_a_roster_is_the_same_to_the_letter():
    assert canonical_json(to_json(FOUR)) == (
        '{"generation":3,"job_id":"job","layout":{"cp":1,"dp":1,"ep":1,"etp":null,"pp":2,"tp":2,"vpp":1},'
        '"members":[{"node_id":"n0","slots":[0,1]},{"node_id":"n1","slots":[0,1]}]}'
    )
