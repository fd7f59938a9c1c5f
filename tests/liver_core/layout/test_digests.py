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
        (PLAIN, "3b54e9b510a742b3c96e432f6e52f5dd1311654661b11e95ccb4c948061b0458"),
        (TIED, "9b8124bb710f9b23b1e8b842485c8c40a7d4690cfca22cc7b8a72d5729da1e76"),
        (FOUR, "a698d88edd0de6702e64dc626ac311fe6a91cda3f260f007a3d738bd45f0b5d4"),
        (EIGHT, "0220216077682d9085a38afd735d2cefe9b2da59a754ef7e45aca3c6007380f8"),
        (
            roster("TP2xPP2xCP2xVPP2", generation=2**31 - 1),
            "218d85ab033c84928c769c9577942a15f1760158dbf025b52c4601fd15831308",
        ),
    ],
)
def test_manifests_and_rosters_have_the_digests_that_were_written_down(value: Manifest | Roster, digest: str):
    assert value.digest() == digest


def test_plans_have_the_digests_that_were_written_down():
    assert plan_digest(PLAIN, FOUR, EIGHT) == "924cf625600ae1cab97b625d235599f4c73e97f1cff364eb1b2afc180995b7f2"
    assert plan_digest(TIED, EIGHT, FOUR) == "ed2e6506f7f56591a1700b4bcdca93f26c0bea93fb157d190f895f30a7efd940"


def test_the_canonical_text_of_a_roster_is_the_same_to_the_letter():
    assert canonical_json(to_json(FOUR)) == (
        '{"generation":3,"job_id":"job","layout":{"cp":1,"dp":1,"ep":1,"etp":1,"pp":2,"tp":2,"vpp":1},'
        '"members":[{"node_id":"n0","slots":[0,1]},{"node_id":"n1","slots":[0,1]}]}'
    )
