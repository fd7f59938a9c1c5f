"""On a device that works late everything that others may see is right, and every single wait is needed for that.

Each scene drives the product's own code over `LateDevice` and asks what another process, another thread or another
stream finds. Without a wait, some seed of some scene finds something else.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from liver_core.device import DeviceWait
from tests.cluster.real_ranks import run_alone

pytestmark = pytest.mark.timeout(180)

SEEDS = 8
ROOT = Path(__file__).resolve().parents[3]

REMOVED = {
    "allocation": (DeviceWait.ALLOCATED,),
    "new ring": (DeviceWait.RING_MADE,),
    "ring": (DeviceWait.SLOT_FILLED, DeviceWait.STEP_APPLIED, DeviceWait.STANDS, DeviceWait.READ),
    "boundary": (DeviceWait.BOUNDARY,),
    "gradients": (DeviceWait.GRADIENTS,),
    "replay": (DeviceWait.REPLAYED,),
    "local copy": (DeviceWait.LOCAL_COPIED,),
    "sockets": (DeviceWait.LANDED,),
    "move-in": (DeviceWait.MOVED_IN,),
    "freeing": (DeviceWait.FREED,),
    "background thread": (DeviceWait.STARTED,),
    "preparation": (DeviceWait.PREPARED,),
    "communicators": (DeviceWait.QUIET,),
}
"""Scene -> the waits that are taken away from it, one at a time."""


def test_every_wait_of_the_product_is_in_the_list_of_those_taken_away():
    assert sorted(why for whys in REMOVED.values() for why in whys) == sorted(DeviceWait)
    used = set()
    for path in (ROOT / "liver_core").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "DeviceWait":
                used.add(node.attr)
    # `read` waits by itself where it reads, so that nobody has to say why.
    assert used == {why.name for why in DeviceWait} - {"READ"}


def test_all_is_right_on_a_late_device_and_no_wait_can_be_left_out():
    found = run_alone(_play, {scene: [str(why.name) for why in whys] for scene, whys in REMOVED.items()}, SEEDS)
    assert {name: wrong for name, wrong in found.items() if name.endswith("/") and wrong} == {}
    assert [name for name, wrong in found.items() if not name.endswith("/") and not wrong] == []


def _play(removed: dict[str, list[str]], seeds: int) -> dict[str, list[str]]:
    """'scene/wait taken away' -> what was found wrong, by seed."""
    from liver_core.worlds import cpu_compat

    cpu_compat.apply()
    from tests.liver_core.device.late_device import LateDevice
    from tests.liver_core.device.scenes import SCENES

    found: dict[str, list[str]] = {}
    for name, whys in removed.items():
        for why in ("", *whys):
            wrong = found.setdefault(f"{name}/{why}", [])
            for seed in range(seeds):
                device = LateDevice(seed, DeviceWait[why] if why else None)
                try:
                    with device.running():
                        SCENES[name](device)
                except Exception as error:
                    wrong.append(f"seed {seed}: {type(error).__name__}: {str(error)[:200]}")
    return found
