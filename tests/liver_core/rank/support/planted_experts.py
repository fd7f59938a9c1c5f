"""The reference job with one mistake of the product's own code: what must be caught, and by what.

Each class changes liver_core in the processes that train it, for as long as they live.
"""

from __future__ import annotations

from typing import Any

from liver_core.training.gpt import GptJob


class ExpertsOfTheOtherRank(GptJob):
    """With EP each rank is taken to have the experts that another one has."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        from dataclasses import replace

        from liver_core.layout.parallel import ParallelLayout

        owner, coordinates = ParallelLayout.owner, ParallelLayout.coordinates

        def turned(self: Any, rank: int) -> Any:
            at = coordinates(self, rank)
            return replace(at, ep=self.ep - 1 - at.ep)

        ParallelLayout.coordinates = turned  # type: ignore[method-assign]
        ParallelLayout.owner = lambda self, of, *, cut, shard, ep=0, pp=0: owner(  # type: ignore[method-assign]
            self, of, cut=cut, shard=shard, ep=self.ep - 1 - ep, pp=pp
        )
        super().__init__(*arguments, **named)


class ShardedOverAllOfDp(GptJob):
    """Experts are cut over DP, and not over expert DP."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        from liver_core.layout.parallel import BufferClass, ParallelLayout

        right_shards, right_shard = ParallelLayout.shards, ParallelLayout.shard
        ParallelLayout.shards = lambda self, of: right_shards(self, BufferClass.DENSE)  # type: ignore[method-assign]
        ParallelLayout.shard = lambda self, of, at: right_shard(self, BufferClass.DENSE, at)  # type: ignore[method-assign]
        super().__init__(*arguments, **named)


class BiasOfTheStepBefore(GptJob):
    """A world that applies the step has the bias from before it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        from liver_core.rank.next_world import NextWorld

        right = NextWorld.install_step_tensors
        NextWorld.install_step_tensors = lambda self, *, before: right(self, before=True)  # type: ignore[method-assign]
        super().__init__(*arguments, **named)


class BiasOfTheStepAfter(GptJob):
    """A world that does the step again has the bias of after it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        from liver_core.rank.next_world import NextWorld

        right = NextWorld.install_step_tensors
        NextWorld.install_step_tensors = lambda self, *, before: right(self, before=False)  # type: ignore[method-assign]
        super().__init__(*arguments, **named)


class ExpertsFirst(GptJob):
    """The buckets of experts come before those of dense parameters."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        from liver_core.layout import shards

        right = shards._stage_buckets
        shards._stage_buckets = lambda *asked: tuple(
            sorted(right(*asked), key=lambda bucket: bucket.buffer.of == "dense")
        )
        super().__init__(*arguments, **named)


class GroupKeySaysWhereItLies(GptJob):
    """The key of a parameter group says whether EP had put its parameters apart."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        from liver_core.state import optimizer_step

        optimizer_step.BY_LAYOUT = "nothing"
        super().__init__(*arguments, **named)


class RoundedBias(GptJob):
    """The bias is taken over before it is fp32."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        from liver_core.state import megatron_optimizer, step_tensors

        def in_its_dtype(model: Any) -> Any:
            for path, module in model.named_modules():
                for name, _ in module.named_buffers(recurse=False):
                    if step_tensors.is_step_tensor(module, name):
                        module.expert_bias.data = module.expert_bias.data.bfloat16().float()
                        yield f"{path}.{name}", getattr(module, name)

        right = step_tensors.StepTensors.install

        def install(self: Any, encoded: Any) -> None:
            right(self, encoded)
            for tensor in self.tensors:
                tensor.copy_(tensor.bfloat16().float())

        megatron_optimizer.step_buffers = in_its_dtype
        step_tensors.StepTensors.install = install  # type: ignore[method-assign]
        super().__init__(*arguments, **named)


class CheckpointOneStepAhead(GptJob):
    """What is due after the step that was handed over sees the bias of the step after it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        import contextlib

        from liver_core.state.step_tensors import StepTensors

        StepTensors.as_before = lambda self: contextlib.nullcontext()  # type: ignore[method-assign, assignment]
        super().__init__(*arguments, **named)
