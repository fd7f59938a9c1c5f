"""Runs a scenario file against the simulator. Pure.

A file is a list of blocks: a command, a line of four dashes, the expected output, an empty line; # starts a comment.
Commands: `job NODE.. [spare NODE..]`; `handoff NODE.. [by NODE]`: an agent opens it, the first member's by itself;
`notice NODE SECONDS`: it will go then; `amend NODE..` of the open one; `rung RUNG`: of handoffs from then on; `cancel`;
`start NODE..`; `cut service|everybody NODE..`; `until TEXT`; `fault KIND NODE [SECONDS]`; `run SECONDS`; `rest`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from liver_core.handoff import Reason, Rung
from liver_core.handoff.proposer_events import Amend
from liver_core.layout import Member, ParallelLayout
from service.simulation.world.agents import SimAgent
from tests.simulation.plans import Fault, Plan
from tests.simulation.simulation import REST_WITHIN_S, Simulation

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
        sim = self.simulation
        match name:
            case "job":
                at = words.index("spare") if "spare" in words else len(words)
                self.simulation = _simulation(tuple(words[:at]), tuple(words[at + 1 :]))
                self.read = 0
            case "handoff":
                self._hand_over(words)
            case "amend":
                self._amend(words)
            case "cancel":
                self._lead().leading.cancel(Reason("a person said so", "cancel"))
            case "notice":
                sim.announce(words[0], sim.clock.now + float(words[1]), by_node=True)
            case "rung":
                self.rung = Rung(words[0])
            case "start":
                sim.start_on(tuple(Member(word, 0) for word in words))
            case "cut":
                sim.cut_off(words[1:], everybody=words[0] == "everybody", seconds=FOREVER_S)
            case "until":
                self._until(" ".join(words))
            case "fault":
                kind = [word for word in words if word not in _nodes(sim) and not word.isdigit()]
                node = next(word for word in words if word in _nodes(sim))
                length_s = float(words[-1]) if words[-1].isdigit() else FOREVER_S
                sim.strike(Fault(" ".join(kind), "", 0.0, Member(node, 0), length_s))
            case "run":
                self._run_for(float(words[0]))
            case "rest":
                self._rest()
            case _:
                raise ValueError(f"unknown command: {command}")
        return self._news()

    def _lead(self) -> SimAgent:
        lead = self.simulation.leads()
        assert lead is not None, "no handoff is open"
        return lead

    def _hand_over(self, words: list[str]) -> None:
        sim, source = self.simulation, self.simulation.worlds[max(self.simulation.worlds)].roster
        by = words[words.index("by") + 1] if "by" in words else source.node_ids()[0]
        names = words[: words.index("by")] if "by" in words else words
        members = tuple(Member(name, 0) for name in names)
        sim.agent(by).leading.open_anyway(sim.proposal(source, members, self.rung))

    def _amend(self, words: list[str]) -> None:
        lead = self._lead()
        current = lead.leading.leader.own.proposer.record.proposal
        assert current is not None
        members, layout = tuple(Member(word, 0) for word in words), ParallelLayout(dp=len(words))
        amended = replace(current, layout=layout, members=members, plan_digest=f"{current.plan_digest}+")
        lead.carry_out(lead.leading.leader.own.feed(Amend(amended), lead.now), lead.leading.carry_out_one)

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
        sim.calm()
        limit_s = sim.clock.now + REST_WITHIN_S
        while not sim.rests():
            assert sim.clock.now < limit_s, f"no rest: {sim.why_not()}"
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
    plan = Plan(members, members[: len(first)], 0.5, (0.0, 0.0, 0.05), chaos_s=FOREVER_S, scripted=True)
    simulation = Simulation(0, plan=plan)
    simulation.notes = []
    return simulation


def _nodes(simulation: Simulation) -> set[str]:
    return {member.node_id for member in simulation.plan.members}
