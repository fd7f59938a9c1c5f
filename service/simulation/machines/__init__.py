"""Replays in which every change is carried by the machines that the product runs: the job rule of the service, the
ladder, a leader and a participant on every node and a cutover in every rank, all on one virtual clock. Pure.

`machine_replay` is the entry. `ground` is where the parts meet: `played_job` does what the service does, `played_agent`
hosts the leader of a node and `played_lead` has them look and hear of each other, `played_node` and `played_rank` do
what the others and their ranks do, `cutover_scene` is the store and the barrier of one cutover. What is played is only
what lies between the machines: how long things take (`change_times`), and that messages arrive. A node stands for all
of its ranks.
"""
