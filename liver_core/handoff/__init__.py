"""How a job goes from world g to world g+1: three sans-IO machines and the two messages between them.

Pure: no threads, no clock, no randomness, no input or output. Events go in, effects come out, in order:

    effects = machine.handle(event, now)

Who hosts which machine:

    Proposer      one per job, in the agent that leads (or the service). Open / Amend / Cancel / MemberLost /
                  ReportReceived / Tick in; PersistProposal / SendOrder / HandoffEnded / Refused out.
    Participant   one per rank (member), in that rank's agent. OrderReceived / RankReported / RankDied / Tick in;
                  Persist / PrepareRank / SetReadyTag / ClearReadyTag / AbortRank / RetireRank / StopRank / QueryRank /
                  SendReport out.
    Cutover       one per handoff, in the rank process, in its main thread. BoundaryAgreed / StateRead /
                  CertificateCompared / BarrierPassed / BarrierFailed / DecisionRead / StoreUnreachable / Withdrawn /
                  Tick in; what to do next out.

Rules for a host:

1. Carry effects out in order. `Persist` and `PersistProposal` are on disk before the next effect is touched; a host
   that dies in between starts again from its journal: Participant(record=..., agent_incarnation=last + 1).start(now).
2. Messages go as `order.to_json()` / `Order.from_json(data)`, the same for Report; MessageError names field and rule.
   Orders and Reports are level-triggered: send the latest, drop what cannot be sent, never queue.
3. RankReported is level-triggered too: it is the answer to QueryRank and what the rank says by itself.
4. The events of Proposer and Participant that have the same name live in their own modules
   (`proposer_events.Tick`, `participant_events.Tick`, `cutover.Tick`).
5. A store that died is never started again for its generation: open a new handoff with a new store.

One handoff, the usual way (stop-and-copy):

    Open -> burn a generation, journal, Order(prepare) to every member of source and target
    Participant: journal the promise, PrepareRank; RankReported(prepared) -> Report(ready)
    all ready -> journal permission, Order(permit); SetReadyTag; RankReported(ready)
    ranks: every boundary reduces `boundary_pair(pack(tag, READY))`; when `agreed(...)`, Cutover takes over:
        BoundaryAgreed -> ReadState -> StateRead -> CompareCertificates -> CertificateCompared -> EnterBarrier ->
        BarrierPassed -> ProposeDecision -> DecisionRead -> ApplyStepInTarget (GO), ApplyStepInSource (NO-GO), Leave
    RankReported(active | left | aborted) -> Report; all active -> Order(retire) -> RetireRank, StopRank(leaver)
    HandoffEnded(active | aborted | broken, reason)

A world without a living source (first start, checkpoint rung) is the same handoff with `source=None`: participants stop
what is left of an older world, ranks load, permission takes the place of the boundary, and the barrier of level STATE
decides GO-REDO.
"""
