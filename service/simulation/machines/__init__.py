"""Replays in which every change is carried by the machines that the product runs, in the simulated world that the seeds
use too (`service.simulation.world`). Pure.

`machine_replay` is the entry. `replayed_world` is the world: nodes come and go as a trace says, and a policy says what
to run on. `steady` are its conditions, with the times of `change_times`; `books` observe it, and say what time went
into (`spent_time`) and what became of each change (`enacted`). A node stands for all of its ranks.
"""
