"""What the parts of a simulated world call each other by. Pure.

Parts and whole know each other, and modules must not: these names stand for the classes of `world`, `agents`, `ranks`,
`rank_cutover` and `worlds`, whose types are not checked where a part uses them.
"""

from typing import Any, TypeAlias

CuttingRank: TypeAlias = Any
SimAgent: TypeAlias = Any
SimRank: TypeAlias = Any
SimWorld: TypeAlias = Any
SimulatedWorld: TypeAlias = Any
