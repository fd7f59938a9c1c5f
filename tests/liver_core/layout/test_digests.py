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
        (FOUR, "3a276fde4cb70b97d9ae478acbcb13a1c46915b5194662970957a80797ee46c6"),
        (EIGHT, "60930a4e837a5f37e3494ac2c3b2cc25b7dccd89e4d1539b3495a1f23f55c329"),
        (
            roster("TP2xPP2xCP2xVPP2", generation=2**31 - 1),
            "ec84c47fffcecc82ed828f756bbceba82186a909c0c73e6865164518f305bc73",
        ),
    ],
)
def test_manifests_and_rosters_have_the_digests_that_were_written_down(value: Manifest | Roster, digest: str):
    assert value.digest() == digest


def test_plans_have_the_digests_that_were_written_down():
    assert plan_digest(PLAIN, FOUR, EIGHT) == "f1168abc9c8b19136fe4d526e0cb40dc078d79a2c5b90266edebde11eb3ba926"
    assert plan_digest(TIED, EIGHT, FOUR) == "23a466c35a7c19620cc8233cd9158bbf47e294981c65e6d3a90b38b345eebaff"


def test_the_canonical_text_of_a_roster_is_the_same_to_the_letter():
    assert canonical_json(to_json(FOUR)) == (
        '{"generation":3,"job_id":"job","layout":{"cp":1,"dp":1,"ep":1,"etp":1,"pp":2,"tp":2,"vpp":1},'
        '"members":[{"node_id":"n0","slot":0},{"node_id":"n0","slot":1},{"node_id":"n1","slot":0},'
        '{"node_id":"n1","slot":1}]}'
    )
