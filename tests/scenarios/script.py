"""Runs a scenario file against the simulator. Pure.

A file is a list of blocks: a command, a line of four dashes, the expected output, an empty line; # starts a comment.
Commands: `job NODE.. [spare NODE..]`; `handoff NODE..` (`service NODE..`: the service opens it); `amend NODE..`;
`notice NODE..`; `until TEXT`; `fault KIND NODE [SECONDS]`; `run SECONDS`; `rest` (no more faults, until all is quiet).
`listen`: agents report to the service from then on, which does `start NODE..`; `cut service|everybody NODE..`.
`rung RUNG`: that handoffs are opened on from then on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from liver_core.handoff import Reason, Rung
from liver_core.handoff.proposer_events import Amend, Cancel, Open
from liver_core.layout import Member
from tests.simulation.plans import LEAD, SERVICE, Fault, Plan
from tests.simulation.simulation import REST_WITHIN_S, THINK_S, Simulation

DASHES = "----"
UNTIL_S = 60.0
FOREVER_S = 1e9


@dataclass(frozen=True, slots=True)
class Block:
    """One command, the comment lines above it, and what it gave."""

    comments: tuple[str, ...]
    command: str
    output: tuple[str, ...]


def parse(text: str) -> list[Block]:
    """The blocks of a file."""
    blocks = []
    for chunk in text.strip().split("\n\n"):
        lines = chunk.splitlines()
        comments = tuple(line for line in lines if line.startswith("#"))
        rest = [line for line in lines if not line.startswith("#")]
        if len(rest) < 2 or rest[1] != DASHES:
            raise ValueError(f"a block is a command, {DASHES} and the output, got: {chunk}")
        blocks.append(Block(comments, rest[0], tuple(rest[2:])))
    return blocks


def render(blocks: list[Block]) -> str:
    """The text of a file."""
    chunks = ["\n".join((*block.comments, block.command, DASHES, *block.output)) for block in blocks]
    return "\n\n".join(chunks) + "\n"


def run_script(blocks: list[Block]) -> list[Block]:
    """The same commands with the output that they give now. Each `job` starts a fresh simulation."""
    scene = Scene()
    return [replace(block, output=scene.run(block.command)) for block in blocks]


class Scene:
    """One job under the hands of a script."""

    def __init__(self) -> None:
        self.simulation = _simulation(("n0", "n1"), ())
        self.read = 0
        self.rung = Rung.STOP_AND_COPY

    def run(self, command: str) -> tuple[str, ...]:
        """Carry out one command and return what happened meanwhile."""
        name, *words = command.split()
        match name:
            case "job":
                at = words.index("spare") if "spare" in words else len(words)
                self.simulation = _simulation(tuple(words[:at]), tuple(words[at + 1 :]))
                self.read = 0
            case "handoff" | "notice" | "amend" | "service":
                self._propose(name, words)
            case "rung":
                self.rung = Rung(words[0])
            case "start":
                self.simulation.starts.want(tuple(Member(word, 0) for word in words))
            case "cut":
                for word in words[1:]:
                    self.simulation.starts.cut(Member(word, 0), everybody=words[0] == "everybody")
            case "until":
                self._until(" ".join(words))
            case "fault":
                kind = [word for word in words if word not in _nodes(self.simulation) and not word.isdigit()]
                node = next(word for word in words if word in _nodes(self.simulation))
                length_s = float(words[-1]) if words[-1].isdigit() else FOREVER_S
                self.simulation._strike(Fault(" ".join(kind), "", 0.0, Member(node, 0), length_s))
            case "run":
                self._run_for(float(words[0]))
            case "rest":
                self._rest()
            case _:
                raise ValueError(f"unknown command: {command}")
        return self._news()

    def _propose(self, name: str, words: list[str]) -> None:
        sim = self.simulation
        host = sim.hosts[SERVICE if name == "service" else LEAD]
        members = tuple(Member(word, 0) for word in words)
        proposal = sim._proposal(sim.worlds[max(sim.worlds)].roster, members, self.rung)
        current = host.proposer.record.proposal
        match name:
            case "handoff" | "service":
                host.handle(Open(proposal))
            case "amend" if current is not None:
                host.handle(Amend(sim.amendment(current, members, current.deadline_utc, current.rung)))
            case _:
                sim.wanted = members
                host.handle(Cancel(Reason("another notice came", "supersede")))

    def _until(self, text: str) -> None:
        sim = self.simulation
        assert sim.notes is not None
        limit_s = sim.clock.now + UNTIL_S
        while not any(text in note for _, note in sim.notes[self.read :]):
            if sim.clock.now > limit_s:
                raise AssertionError(f"never happened in {UNTIL_S:.0f} s: {text}; but {self._news()}")
            sim.clock.run_next()

    def _run_for(self, seconds: float) -> None:
        until_s = self.simulation.clock.now + seconds
        self.simulation.clock.after(seconds, lambda: None)
        while self.simulation.clock.now < until_s:
            self.simulation.clock.run_next()

    def _rest(self) -> None:
        sim = self.simulation
        sim.clock.after(THINK_S, sim._think)
        sim.clock.after(THINK_S + 2.0, sim._calm)
        limit_s = sim.clock.now + REST_WITHIN_S
        while sim.chaos or not sim._rests():
            assert sim.clock.now < limit_s, f"no rest: {sim._why_not()}"
            sim.clock.run_next()

    def _news(self) -> tuple[str, ...]:
        assert self.simulation.notes is not None
        # Checkpoints are written beside all this, and have no part in a handoff.
        news = tuple(note for _, note in self.simulation.notes[self.read :] if "publishes the checkpoint" not in note)
        self.read = len(self.simulation.notes)
        return news


def _simulation(first: tuple[str, ...], spare: tuple[str, ...]) -> Simulation:
    """A job that nothing disturbs but the script: a step takes half a second, a message at most 55 ms."""
    members = tuple(Member(node, 0) for node in (*first, *spare))
    plan = Plan(members, members[: len(first)], 0.5, 10.0, (0.0, 0.0, 0.05), (), (), FOREVER_S)
    simulation = Simulation(0, plan=plan)
    simulation.notes = []
    simulation.starts.begin()
    simulation.listing.begin()
    return simulation


def _nodes(simulation: Simulation) -> set[str]:
    return {member.node_id for member in simulation.plan.members}
