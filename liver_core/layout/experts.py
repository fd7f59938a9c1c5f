"""The experts of a model by their sizes, before anything is built. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """count: of each layer that has experts. ffn: inner size of one. topk: to how many of them a token goes.
    layers: of each layer of the model, whether it has experts. shared_ffn: inner size of those that all tokens go to.
    """

    count: int
    ffn: int
    topk: int
    layers: tuple[bool, ...]
    shared_ffn: int = 0

    def layer_parameters(self, hidden: int) -> int:
        """Of one layer's experts, which are gated units, with their router and the shared ones."""
        return self.count * 3 * hidden * self.ffn + self.dense_parameters(hidden)

    def dense_parameters(self, hidden: int) -> int:
        """Those of them that expert parallelism does not split: of the router and of shared experts."""
        return self.count * hidden + 3 * hidden * self.shared_ffn


def layers_with_experts(every: int | Sequence[int], num_layers: int) -> tuple[bool, ...]:
    """Megatron's `moe_layer_freq`: the first of so many layers has experts, or of each layer whether it has."""
    if isinstance(every, int):
        return tuple(layer % every == 0 for layer in range(num_layers))
    return tuple(map(bool, every))
