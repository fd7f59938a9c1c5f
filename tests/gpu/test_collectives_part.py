"""What the check of collectives says, without a group."""

from __future__ import annotations

import pytest

from tests.gpu.check import Verdict

pytestmark = pytest.mark.real
ABSENT = "RuntimeError: No backend type associated with device type cuda"


def test_groups_that_take_no_tensor_of_the_device_are_one_finding_and_not_one_for_each_collective() -> None:
    from tests.gpu.collectives_part import NEEDED, NO_GROUP, OF_SOME, finding_of

    rank = {"kind of group": NO_GROUP} | dict.fromkeys((*NEEDED, *OF_SOME), ABSENT)
    found = finding_of([rank, rank])
    assert found.verdict is Verdict.FAILED
    assert found.reason == f"groups of this torch take no tensors of the device: {ABSENT}"


def test_what_some_layouts_need_may_be_absent_and_what_all_need_may_not() -> None:
    from tests.gpu.collectives_part import NEEDED, OF_SOME, finding_of

    right = {"kind of group": "gloo"} | dict.fromkeys((*NEEDED, *OF_SOME), "")
    alone = finding_of([right, right | {"all to all (EP)": ABSENT}])
    assert alone.verdict is Verdict.PASSED and f"not to be had: all to all (EP) ({ABSENT})" in alone.reason
    broken = finding_of([right, right | {"broadcast": "other numbers than it must give"}])
    assert broken.verdict is Verdict.FAILED and broken.reason == "broadcast: other numbers than it must give"
