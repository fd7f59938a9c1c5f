"""What is played on a late device: each scene runs one part of the product and asserts what somebody else finds."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from liver_core.certificate import MASK, CertificatePlan
from liver_core.device.region import as_region
from liver_core.device.threads import background
from liver_core.handoff.pending_events import Built
from liver_core.layout import Box, ParallelLayout, ResidentBox
from liver_core.rank import next_world, pending_handoff
from liver_core.rank.cutover import source_side
from liver_core.rank.next_world import NextWorld
from liver_core.rank.pending_handoff import PendingHandoff
from liver_core.rank.stream.source_stream import SourceStream
from liver_core.reshard.plan import CopyRuns
from liver_core.state.host_memory import move_in
from liver_core.state.live_state import allocate, free
from liver_core.state.step_tensors import StepTensors
from liver_core.streaming.follow import Follower, Replay
from liver_core.streaming.header import StepHeader
from liver_core.streaming.reader import Following, TargetStream
from liver_core.streaming.ring import BEFORE_ANY, COUNTER, SLOTS, SourceRing, ring_kind, slot_of
from liver_core.streaming.tiles import LOCAL
from liver_core.transport.gloo import TorchDistributedTransport
from liver_core.transport.landing_blocks import LandingBlocks
from liver_core.transport.protocol import Read
from liver_core.transport.regions import Address, Regions, RegionSpec, Registered
from liver_core.worlds.released_storage import release
from tests.liver_core.device.late_device import LateDevice, land, raw

N = 48
CPU = torch.device("cpu")
NOTHING: Any = None


def allocation(device: LateDevice) -> None:
    """Bytes that land as soon as memory is there stay there."""
    region = torch.empty(N)
    live = _live({"master": region})
    release([region])
    allocate(live)
    land(region, 5.0)
    device.finish()
    assert raw(region) == [5.0] * N, "what landed was zeroed"


def ring_made(device: LateDevice) -> None:
    """The zeros of a new ring do not come after the gradients of a step."""
    gradients = torch.full((N,), 3.0)
    with device.own(CPU):
        made = SourceRing(torch.zeros(N), 2, version=0)
    made.publish(gradients, StepHeader(1, 1.0, 1.0, (), {}, True))
    while made.settle_next():
        pass
    device.finish()
    assert raw(made.slots[ring_kind(1)].tensors[0]) == [3.0] * N


def ring(device: LateDevice) -> None:
    """A source steps; a reader that nobody waits for looks in between, and threads hash what stands."""
    state, gradients = torch.zeros(N), torch.zeros(N)
    plan = CertificatePlan([ResidentBox("w", Box((0,), (N,)), 0)], {"w": (N,)})
    with device.own(CPU):
        made = SourceRing(torch.zeros(N), 2, version=BEFORE_ANY)
    live: Any = SimpleNamespace(regions={"master": state}, manifest=NOTHING)
    with mock.patch.object(SourceStream, "_in_background"):
        stream = SourceStream(live, plan, made, rank=0, target=ParallelLayout())

    def publish(active: Any, version: int, norm: float, steps: Any) -> None:
        made.publish(gradients, StepHeader(version, norm, 1.0, (), {}, True))
        stream._published.append(version)

    with mock.patch.object(stream, "_publish", publish):
        stream.attach(0, (), since=0.0)
        for version in range(1, 5):
            gradients.fill_(float(version))
            gradients.mul_(10.0)
            stream.before_step(NOTHING, version, 1.0, ())
            _look(made, state)
            while device.chance() and made.settle_next():
                _look(made, state)
            state.mul_(2.0)
            state.add_(float(version))
            _look(made, state)
            stream.after_step(version)
            _look(made, state)
            while device.chance() and made.settle_next():
                _look(made, state)
            with device.own(CPU), mock.patch("liver_core.rank.stream.source_stream.state_kinds", lambda _: ("master",)):
                assert stream._hash_at(version) == [_sum_of(plan, _state(version), "master")], "of another state"
            device.drift()
            with device.own(CPU):
                stream._sum_gradients()
            assert stream._sums[version] == _sum_of(plan, 10.0 * version, "grad"), "of other gradients"
            while made.settle_next():
                _look(made, state)
            _look(made, state)


def _look(made: SourceRing, state: torch.Tensor) -> None:
    """As a reader does: what lies between two equal even looks is believed."""
    counter, slots = made.small[COUNTER].numpy(), made.small[SLOTS].numpy()
    before = int(counter[0])
    values = raw(state)
    if before % 2 == 0 and int(counter[0]) == before:
        assert values == [_state(before // 2)] * N, f"state of version {before // 2}"
    for version in {int(slot) // 2 for slot in slots if slot > 0 and slot % 2 == 0}:
        region = made.slots[ring_kind(slot_of(version, made.depth))]
        assert raw(region.tensors[0]) == [10.0 * version] * N, f"gradients of version {version}"


def _state(version: int) -> float:
    value = 0.0
    for step in range(1, version + 1):
        value = 2 * value + step
    return value


def _sum_of(plan: CertificatePlan, value: float, kind: str) -> int:
    from liver_core.certificate.certificate_plan import _keys
    from liver_core.certificate.on_host import host_totals

    with _on_host():
        total = host_totals([torch.full((N,), value)], plan._whole, _keys(plan.parameters, kind))
    return sum(total) & MASK


@contextmanager
def _on_host():
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def boundary(device: LateDevice) -> None:
    """Who reads that the boundary is reached reads the state of the last step."""
    state = torch.zeros(N)
    state.add_(3.0)
    side, seen = _source_side({"master": state}, lambda name: raw(state))
    side.publish_boundary()
    assert seen == {"boundary": [3.0] * N}


def gradients(device: LateDevice) -> None:
    """Who reads the norm reads the gradients in place."""
    reduced = torch.zeros(N)
    reduced.add_(4.0)
    side, seen = _source_side({"grad": reduced}, lambda name: raw(reduced))
    with (
        mock.patch.object(side, "_collective", lambda what, action: action()),
        mock.patch.object(side, "_start_sum", lambda name, part: None),
        mock.patch.object(source_side, "hashed", lambda *_: NOTHING),
    ):
        side.publish_gradients()
    assert seen == {"norm": [4.0] * N}


def _source_side(regions: dict[str, torch.Tensor], look: Any) -> tuple[source_side.SourceSide, dict[str, Any]]:
    seen: dict[str, Any] = {}
    member = "a"
    following: Any = SimpleNamespace(
        request=SimpleNamespace(source=SimpleNamespace(members=(member,)), target=SimpleNamespace(members=(member,))),
        source_rank=0,
        source_certificate=object(),
        exchange=SimpleNamespace(post=lambda name, value: seen.update({name: look(name)})),
    )
    live = SimpleNamespace(regions=regions, device=CPU, manifest=SimpleNamespace(whole=()))
    active: Any = SimpleNamespace(live=live, state=NOTHING)
    pause = source_side.Pause(following, 0, lambda: 0.0, lambda point: None)
    return source_side.SourceSide(pause, active, lambda: {"version": 1}, None), seen


def replay(device: LateDevice) -> None:
    """The gradients of the next step land over those of a step that has been replayed."""
    master, landing = torch.zeros(N), torch.zeros(N)
    device.finish()
    following = Following((), {}, {"master": master, "grad": landing}, ("master",))

    def step(spans: Any, header: StepHeader) -> None:
        master.add_(landing)

    stream = TargetStream(None, following, Follower((), depth=1), step)
    with device.own(CPU):
        for version in (1, 2, 3):
            land(landing, float(version))
            stream._carry_out(Replay(StepHeader(version, 1.0, 0.0, (), {}, True), ()))
    device.finish()
    assert raw(master) == [6.0] * N


def local_copy(device: LateDevice) -> None:
    """What a survivor copied of its own state is complete before it looks again whether that has changed."""
    source, target = torch.zeros(N), torch.zeros(N)
    source.fill_(1.0)
    device.finish()
    following = Following((), {}, {"master": target, "grad": torch.zeros(N)}, ("master",), local={"master": source})
    stream = TargetStream(None, following, Follower((), depth=1), lambda spans, header: None)
    with device.own(CPU):
        stream._read([Read(LOCAL, "master", (CopyRuns(0, 0, N),))])
    source.fill_(2.0)
    device.finish()
    assert raw(target) == [1.0] * N


def sockets(device: LateDevice) -> None:
    """A read over sockets is over when its bytes are on the device."""
    target, staging = torch.zeros(N), torch.zeros(N * 4, dtype=torch.uint8)
    device.finish()
    land(staging[: N * 4].view(torch.float32), 9.0)
    address = Address("torch", "peer", {"master": RegionSpec.of(target)})

    class Endpoint:
        _finish = TorchDistributedTransport._finish

        def __init__(self) -> None:
            self._regions = Regions(targets={"master": Registered.of(as_region(target))})
            self._peers = {0: SimpleNamespace(address=address, pair=object())}
            self._blocks = LandingBlocks(N * 4)

        def _check_open(self, phase: Any) -> None:
            return

        def _ask(self, each: Any, deadline: float) -> None:
            each.staging, each.work = staging, SimpleNamespace(wait=lambda limit: None)

    endpoint: Any = Endpoint()
    TorchDistributedTransport.read(endpoint, [Read(0, "master", (CopyRuns(0, 0, N),))], 1e12)
    assert raw(target) == [9.0] * N


def move_in_scene(device: LateDevice) -> None:
    """Host memory is freed once what waited there is on the device."""
    home, waiting = torch.empty(N), torch.empty(N)
    device.finish()
    land(waiting, 7.0)
    live = _live({"master": waiting})
    live.homes, live.hollow = {"master": as_region(home)}, (home,)
    release([home])
    move_in(live, lambda on_device, on_host: None)
    device.finish()
    assert raw(live.regions["master"].tensors[0]) == [7.0] * N


def freeing(device: LateDevice) -> None:
    """Another thread frees a world while the device is still in its last operation."""
    region, other = torch.zeros(N), torch.zeros(N)
    region.fill_(2.0)
    other.copy_(region)
    with device.own(CPU):
        free(_live({"master": region}))
    device.finish()
    assert raw(other) == [2.0] * N


def background_thread(device: LateDevice) -> None:
    """A thread finds what the thread that started it has queued."""
    from liver_core.device import read

    value, found = torch.zeros(1, dtype=torch.int64), []
    value.fill_(7)
    thread = background(lambda: found.append(read(value)), name="reads")
    thread.start()
    thread.join(30)
    assert found == [[7]]


def preparation(device: LateDevice) -> None:
    """The main thread finds what the preparing thread has queued."""
    region = torch.zeros(N)
    device.finish()
    made = SimpleNamespace(streams=False, lacks_communicators=False, why_it_fell=None)

    def run() -> Any:
        region.fill_(8.0)
        return made

    prepared: Any = SimpleNamespace(run=run, request=SimpleNamespace(store=None))
    pending: Any = SimpleNamespace(_worlds={})
    with device.own(CPU), mock.patch.object(pending_handoff, "expect_quick_answers", lambda store: None):
        assert isinstance(PendingHandoff._build(pending, 1, prepared), Built)
    other = torch.zeros(N)
    other.copy_(region)
    device.finish()
    assert raw(region) == raw(other) == [8.0] * N
    region.fill_(8.0)


def communicators(device: LateDevice) -> None:
    """Nothing of any stream is left to do when NCCL makes communicators."""
    trained, replayed = torch.zeros(N), torch.zeros(N)
    device.finish()
    trained.fill_(1.0)
    with device.own(CPU):
        replayed.fill_(2.0)
    found = []
    nccl = SimpleNamespace(connect=lambda limit_s, since: found.append((raw(trained), raw(replayed))))
    made: Any = SimpleNamespace(source_rank=1, world=SimpleNamespace(nccl=nccl), measures={}, connect_s=1.0)
    with mock.patch.object(next_world, "own_device", lambda: CPU):
        NextWorld.connect(made)
    assert found == [([1.0] * N, [2.0] * N)]


def _live(regions: dict[str, torch.Tensor]) -> Any:
    held = {kind: as_region(tensor) for kind, tensor in regions.items()}
    return SimpleNamespace(
        regions=held, homes={}, hollow=(), buffers=lambda: (), device=CPU, step_tensors=StepTensors()
    )


SCENES = {
    "allocation": allocation,
    "new ring": ring_made,
    "ring": ring,
    "boundary": boundary,
    "gradients": gradients,
    "replay": replay,
    "local copy": local_copy,
    "sockets": sockets,
    "move-in": move_in_scene,
    "freeing": freeing,
    "background thread": background_thread,
    "preparation": preparation,
    "communicators": communicators,
}
