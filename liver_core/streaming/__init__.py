"""State that streams while training goes on: pre-copy of tiles at one version, and replay of each step on them.

Source side: `ring` (counters, ring of gradients, `header`). Target side: `tiles` (what is read where), `follow` (the
algorithm, sans-IO), `target` (carries it out), `replay` (one step on windows). `budget` derives tile size and ring
depth. Pure, without torch: tiles, follow, header, budget.

Versions: a version is the number of optimizer steps attempted. A source's counter is twice its version, and odd while
it steps. The slot of version v holds the gradient of the step from v - 1 to v.
"""
