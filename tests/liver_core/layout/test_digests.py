"""Digests that were written down once: releases that compute different ones of one value cannot work together."""

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
        (PLAIN, "18364dee3a76f4c8bf9ec6a7a92834996eee8013acb84595f26d508cee13a0e8"),
        (TIED, "49b6696480aa149bba0c1518be76eda18817c4b36c58124511fbd13cdb9a022a"),
        (FOUR, "3a276fde4cb70b97d9ae478acbcb13a1c46915b5194662970957a80797ee46c6"),
        (EIGHT, "60930a4e837a5f37e3494ac2c3b2cc25b7dccd89e4d1539b3495a1f23f55c329"),
        (
            roster("TP2xPP2xCP2xVPP2", generation=2**31 - 1),
            "ec84c47fffcecc82ed828f756bbceba82186a909c0c73e6865164518f305bc73",
        ),
    ],
)
def test_manifests_and_rosters_have_the_digests_of_the_first_release(value: Manifest | Roster, digest: str):
    assert value.digest() == digest


def test_plans_have_the_digests_of_the_first_release():
    assert plan_digest(PLAIN, FOUR, EIGHT) == "9f14cee381f1a3224665f09314c19b5c113f56608af3707b28b9bd3b8043d1cc"
    assert plan_digest(TIED, EIGHT, FOUR) == "8ff4fffb027aeacb2155db24c9d7d3c1e886c89c6dc61555b98329699bc74f3f"


def test_the_canonical_text_of_a_roster_is_the_same_to_the_letter():
    assert canonical_json(to_json(FOUR)) == (
        '{"generation":3,"job_id":"job","layout":{"cp":1,"dp":1,"ep":1,"etp":1,"pp":2,"tp":2,"vpp":1},'
        '"members":[{"node_id":"n0","slot":0},{"node_id":"n0","slot":1},{"node_id":"n1","slot":0},'
        '{"node_id":"n1","slot":1}]}'
    )
