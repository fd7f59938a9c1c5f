"""Which of its two transports a mixed endpoint uses, and what it says when one of them fails."""

from __future__ import annotations

import pytest
import torch

from liver_core.transport.mixed import MixedTransport, Wire
from liver_core.transport.protocol import Call, Read, TransportError, TransportTimeout, WayLost
from tests.liver_core.transport.in_memory import Fault, FaultKind, InMemoryTransport, MemoryNetwork
from tests.liver_core.transport.ranks import Run
from tests.liver_core.transport.test_contract import soon


class TwoSided(InMemoryTransport):
    one_sided = False
    two_sided_because = "it is so"


class Picky(InMemoryTransport):
    """Reaches the sources named here only."""

    reach: frozenset[str] = frozenset()

    def connect(self, peer: int, address: bytes, deadline: float) -> None:
        if not any(name.encode() in address for name in self.reach):
            raise TransportError(Call.CONNECT, "too far", peer=peer)
        super().connect(peer, address, deadline)


def test_each_peer_is_read_over_the_first_transport_that_reaches_it():
    near, far, reader = world(reach={"zero"})
    report = reader.read(both(), soon())
    assert [(each.peer, each.bytes) for each in report.peers] == [(0, 40), (1, 80)]
    assert not reader.one_sided
    assert (reader.wire(0), reader.wire(1)) == (Wire("near"), Wire("far", ("near: too far",)))
    far.inject("one", Fault(FaultKind.DIE))
    assert reader.read(both()[:1], soon()).bytes == 40
    near.inject("zero", Fault(FaultKind.DIE))
    with pytest.raises(TransportError, match="'zero' is gone"):
        reader.read(both()[:1], soon())


def test_with_near_peers_only_it_is_one_sided_and_never_asks_the_far_one():
    _, far, reader = world(reach={"zero", "one"})
    far.inject("zero", Fault(FaultKind.DIE))
    far.inject("one", Fault(FaultKind.DIE))
    assert reader.one_sided
    assert reader.read(both(), soon()).bytes == 120


def test_a_failure_of_one_is_raised_after_the_other_has_ended():
    _, far, reader = world(reach={"zero"})
    far.inject("one", Fault(FaultKind.DIE))
    with pytest.raises(TransportError) as caught:
        reader.read(both(), soon())
    assert caught.value.peer == 1
    assert TARGET[:10].tolist() == [1.0] * 10


def test_a_peer_that_neither_reaches_is_refused_with_both_reasons():
    network = MemoryNetwork()
    source = mixed("source", network, MemoryNetwork(), {"source"})
    source.register(sources={"master": torch.ones(4)})
    reader = mixed("reader", network, MemoryNetwork(), set())
    with pytest.raises(TransportError, match="near: too far; far: 'source' is gone"):
        reader.connect(0, source.address(), soon())


def test_why_peers_are_not_read_one_sidedly_is_in_the_log_once_for_each_reason(caplog: pytest.LogCaptureFixture):
    near, far = MemoryNetwork(), MemoryNetwork()
    reader = mixed("reader", near, far, {"close"})
    for peer, name in enumerate(("away", "gone", "close")):
        source = mixed(name, near, far, {name})
        source.register(sources={"master": torch.ones(4)})
        reader.connect(peer, source.address(), soon())
    said = [record.getMessage() for record in caplog.records]
    assert said == ["rank 0 is not read one-sidedly, reads take turns with training: near: too far"]


def test_a_near_peer_that_does_not_answer_is_a_timeout_and_no_reason_to_go_far():
    network = MemoryNetwork()
    source = mixed("source", network, network_far := MemoryNetwork(), {"source"})
    source.register(sources={"master": torch.ones(4)})
    reader = mixed("reader", network, network_far, {"source"})
    network.inject("source", Fault(FaultKind.DROP))
    with pytest.raises(TransportTimeout):
        reader.connect(0, source.address(), soon(0.05))


class Unusable(InMemoryTransport):
    """Cannot be set up for what `fails` names."""

    fails: frozenset[str] = frozenset()

    def register(self, *, sources=None, targets=None) -> None:
        if (sources and "sources" in self.fails) or (targets and "targets" in self.fails):
            raise TransportError(Call.REGISTER, "no backend")
        super().register(sources=sources, targets=targets)

    def start_progress(self) -> None:
        assert "sources" not in self.fails, "what was never set up serves nothing"
        if "progress" in self.fails:
            raise TransportError(Call.REGISTER, "no backend")
        super().start_progress()


def unusable(name: str, near: MemoryNetwork, far: MemoryNetwork, *fails: str) -> MixedTransport:
    broken = Unusable(name, near)
    broken.fails = frozenset(fails)
    return MixedTransport(name, {"near": broken, "far": TwoSided(name, far)})


def test_a_source_that_cannot_be_read_one_sidedly_is_read_over_the_far_one():
    near, far = MemoryNetwork(), MemoryNetwork()
    source = unusable("source", near, far, "sources")
    source.register(sources={"master": torch.full((30,), 7.0)})
    source.start_progress()
    source.calm()
    reader = mixed("reader", near, far, {"source"})
    TARGET.zero_()
    reader.register(targets={"master": TARGET})
    reader.connect(0, source.address(), soon())
    assert reader.read([Read(0, "master", (Run(0, 0, 10),))], soon()).bytes == 40
    assert TARGET[:10].tolist() == [7.0] * 10 and not reader.one_sided
    assert reader.two_sided_because == "source is read over far: near: 'source' cannot be read over it: no backend"
    source.stop_progress()


def test_a_reader_whose_near_half_cannot_be_set_up_reads_over_the_far_one_and_still_serves():
    near, far = MemoryNetwork(), MemoryNetwork()
    source = mixed("source", near, far, {"source"})
    source.register(sources={"master": torch.full((30,), 7.0)})
    reader = unusable("reader", near, far, "targets")
    reader.register(sources={"master": torch.full((30,), 8.0)})
    own = reader.address()
    TARGET.zero_()
    reader.register(targets={"master": TARGET})
    assert not reader.one_sided
    reader.connect(0, source.address(), soon())
    assert reader.read([Read(0, "master", (Run(0, 0, 10),))], soon()).bytes == 40
    other = mixed("other", near, far, {"reader"})
    other.register(targets={"master": torch.zeros(30)})
    other.connect(0, own, soon())
    assert other.one_sided and other.read([Read(0, "master", (Run(0, 0, 5),))], soon()).bytes == 20


def test_a_newcomer_that_begins_to_serve_before_it_has_anything_finds_out_there_and_reads_over_the_far_one():
    near, far = MemoryNetwork(), MemoryNetwork()
    source = mixed("source", near, far, {"source"})
    source.register(sources={"master": torch.full((30,), 7.0)})
    newcomer = unusable("newcomer", near, far, "progress", "targets")
    newcomer.start_progress()
    TARGET.zero_()
    newcomer.register(targets={"master": TARGET})
    newcomer.connect(0, source.address(), soon())
    assert newcomer.read([Read(0, "master", (Run(0, 0, 10),))], soon()).bytes == 40
    assert TARGET[:10].tolist() == [7.0] * 10 and not newcomer.one_sided
    newcomer.calm()
    newcomer.stop_progress()


def test_a_near_half_that_fails_after_peers_are_connected_over_it_is_given_up_for_them_too():
    near, far = MemoryNetwork(), MemoryNetwork()
    source = mixed("source", near, far, {"source"})
    source.register(sources={"master": torch.full((30,), 7.0)})
    reader = unusable("reader", near, far, "targets")
    reader.connect(0, source.address(), soon())
    assert reader.one_sided
    TARGET.zero_()
    reader.register(targets={"master": TARGET})
    assert not reader.one_sided
    assert reader.read([Read(0, "master", (Run(0, 0, 10),))], soon()).bytes == 40
    assert TARGET[:10].tolist() == [7.0] * 10


def test_peers_that_only_the_lost_half_reached_are_named():
    near, far = MemoryNetwork(), MemoryNetwork()
    source = mixed("source", near, far, {"source"})
    source.register(sources={"master": torch.ones(30)})
    reader = unusable("reader", near, MemoryNetwork(), "targets")
    reader.connect(3, source.address(), soon())
    with pytest.raises(TransportError, match="near: no backend; far: ") as failed:
        reader.register(targets={"master": torch.zeros(30)})
    assert failed.value.peer == 3


class Lonely(InMemoryTransport):
    """Loses its way with the first peer that is not reached."""

    reach: frozenset[str] = frozenset()

    def connect(self, peer: int, address: bytes, deadline: float) -> None:
        if not any(name.encode() in address for name in self.reach):
            raise WayLost(Call.CONNECT, "no answer", peer=peer)
        super().connect(peer, address, deadline)


def test_a_way_that_is_lost_is_asked_for_no_further_peer_and_its_peers_move_to_the_next(
    caplog: pytest.LogCaptureFixture,
):
    near, far = MemoryNetwork(), MemoryNetwork()
    first = Lonely("reader", near)
    first.reach = frozenset({"zero", "two"})
    reader = MixedTransport("reader", {"near": first, "far": TwoSided("reader", far)})
    TARGET.zero_()
    reader.register(targets={"master": TARGET})
    for peer, name in enumerate(("zero", "one", "two")):
        source = mixed(name, near, far, set())
        source.register(sources={"master": torch.full((30,), float(peer + 1))})
        reader.connect(peer, source.address(), soon())
        near.inject(name, Fault(FaultKind.DIE))
    reads = [Read(peer, "master", (Run(0, 10 * peer, 10),)) for peer in range(3)]
    assert reader.read(reads, soon()).bytes == 120
    assert TARGET.tolist() == [1.0] * 10 + [2.0] * 10 + [3.0] * 10 and not reader.one_sided
    assert [record.getMessage() for record in caplog.records] == ["reads over near are not possible here: no answer"]


def test_a_peer_that_no_other_way_reaches_keeps_none_from_moving():
    near, far = MemoryNetwork(), MemoryNetwork()
    first = Lonely("reader", near)
    first.reach = frozenset({"zero", "one"})
    reader = MixedTransport("reader", {"near": first, "far": InMemoryTransport("reader", far)})
    reader.register(targets={"master": torch.zeros(30)})
    sources = [mixed(name, near, far, set()) for name in ("zero", "one", "two")]
    for source in sources:
        source.register(sources={"master": torch.ones(30)})
    for peer in (0, 1):
        reader.connect(peer, sources[peer].address(), soon())
    far.inject("zero", Fault(FaultKind.DIE))
    reader.connect(2, sources[2].address(), soon())
    assert [reader.wire(peer).way for peer in (1, 2)] == ["far", "far"]
    assert reader.read([Read(peer, "master", (Run(0, 0, 10),)) for peer in (1, 2)], soon()).bytes == 80
    with pytest.raises(TransportError, match="not connected"):
        reader.read([Read(0, "master", (Run(0, 0, 10),))], soon())


@pytest.mark.parametrize(("ours", "theirs"), [("abc", "ac"), ("ac", "abc"), ("c", "abc"), ("abc", "c")])
def test_endpoints_need_not_have_the_same_ways(ours: str, theirs: str):
    networks = {way: MemoryNetwork() for way in "abc"}

    def endpoint(name: str, ways: str) -> MixedTransport:
        kinds = {way: TwoSided if way == "c" else InMemoryTransport for way in ways}
        return MixedTransport(name, {way: kind(name, networks[way]) for way, kind in kinds.items()})

    source, reader = endpoint("source", theirs), endpoint("reader", ours)
    source.register(sources={"master": torch.ones(30)})
    reader.register(targets={"master": TARGET})
    reader.connect(0, source.address(), soon())
    assert reader.read([Read(0, "master", (Run(0, 0, 30),))], soon()).bytes == 120
    assert reader.one_sided == ("a" in ours and "a" in theirs)


TARGET = torch.zeros(30)


def world(reach: set[str]) -> tuple[MemoryNetwork, MemoryNetwork, MixedTransport]:
    near, far = MemoryNetwork(), MemoryNetwork()
    TARGET.zero_()
    reader = mixed("reader", near, far, reach)
    reader.register(targets={"master": TARGET})
    for peer, name in enumerate(("zero", "one")):
        source = mixed(name, near, far, set())
        source.register(sources={"master": torch.full((30,), float(peer + 1))})
        reader.connect(peer, source.address(), soon())
    return near, far, reader


def mixed(name: str, near: MemoryNetwork, far: MemoryNetwork, reach: set[str]) -> MixedTransport:
    picky = Picky(name, near)
    picky.reach = frozenset(reach)
    return MixedTransport(name, {"near": picky, "far": TwoSided(name, far)})


def both() -> list[Read]:
    return [Read(0, "master", (Run(0, 0, 10),)), Read(1, "master", (Run(0, 10, 20),))]
