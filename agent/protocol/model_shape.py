"""The section `model` of a job file: a model by its sizes, in Megatron's names. Pure."""

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)

from agent.protocol.job_part import JobPart
from liver_core.layout.experts import ExpertShape, layers_with_experts


def _layer_frequency(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """One rule, in place of one for each of the two forms."""
    try:
        return read(tuple(value) if isinstance(value, list) else value)
    except ValidationError:
        raise ValueError("must be a whole number of at least 1, or a list of 1 and 0, one for each layer") from None


LayerFrequency = Annotated[
    Annotated[int, Field(ge=1, le=10_000)] | Annotated[tuple[Literal[0, 1], ...], Field(max_length=10_000)],
    WrapValidator(_layer_frequency),
]
ROUTER_TOPK = 2
"""Megatron's default of `moe_router_topk`."""


class ModelShape(JobPart):
    """What the planner must know to refuse an impossible layout; names are Megatron's. The job gets these too."""

    num_layers: int = Field(ge=1, le=10_000)
    num_attention_heads: int = Field(ge=1, le=10_000)
    num_query_groups: int | None = Field(default=None, ge=1, le=10_000)
    hidden_size: int = Field(ge=1, le=1_000_000)
    ffn_hidden_size: int | None = Field(default=None, ge=1, le=4_000_000)
    padded_vocab_size: int = Field(ge=1, le=10_000_000, description="Fixed for life; a multiple of every TP size used.")
    seq_length: int = Field(ge=1, le=10_000_000)
    num_experts: int | None = Field(default=None, ge=1, le=10_000, description="Of each layer that has experts.")
    moe_ffn_hidden_size: int | None = Field(
        default=None, ge=1, le=4_000_000, description="Of an expert; not given: ffn_hidden_size."
    )
    moe_router_topk: int | None = Field(
        default=None, validate_default=True, ge=1, le=10_000, description="To how many a token goes; not given: 2."
    )
    moe_shared_expert_intermediate_size: int | None = Field(
        default=None, ge=1, le=4_000_000, description="Of experts that all tokens go to; not given: there are none."
    )
    moe_layer_freq: LayerFrequency | None = Field(
        default=None, description="Every how many layers one has experts, or of each layer 1 or 0; not given: all have."
    )
    share_embeddings_and_output_weights: bool | None = Field(
        default=None, description="Tied embeddings, which run with PP1 only."
    )

    @field_validator("num_query_groups", "hidden_size")
    @classmethod
    def _divisible(cls, value: int | None, info: ValidationInfo) -> int | None:
        heads = info.data.get("num_attention_heads")
        if value is None or heads is None:
            return value
        if info.field_name == "hidden_size" and value % heads:
            raise ValueError(f"model.hidden_size {value} must be divisible by model.num_attention_heads {heads}")
        if info.field_name == "num_query_groups" and heads % value:
            raise ValueError(f"model.num_attention_heads {heads} must be divisible by model.num_query_groups {value}")
        return value

    @field_validator("moe_ffn_hidden_size", "moe_router_topk", "moe_shared_expert_intermediate_size", "moe_layer_freq")
    @classmethod
    def _of_experts(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and info.data.get("num_experts", 1) is None:
            raise ValueError(f"model.{info.field_name} needs model.num_experts")
        return value

    @field_validator("moe_router_topk")
    @classmethod
    def _experts_are_enough(cls, value: int | None, info: ValidationInfo) -> int | None:
        experts, topk = info.data.get("num_experts"), value or ROUTER_TOPK
        if experts is not None and topk > experts:
            default = " (Megatron's default)" if value is None else ""
            raise ValueError(f"model.moe_router_topk {topk}{default} must be at most model.num_experts {experts}")
        return value

    @field_validator("moe_layer_freq")
    @classmethod
    def _each_layer_is_named(cls, value: int | tuple[int, ...] | None, info: ValidationInfo) -> Any:
        layers = info.data.get("num_layers")
        if not isinstance(value, tuple) or layers is None:
            return value
        if len(value) != layers:
            raise ValueError(f"must say 1 or 0 of each layer, model.num_layers is {layers}, the list has {len(value)}")
        if not any(value):
            raise ValueError("must have a 1: without experts in any layer leave model.num_experts out")
        return value

    @property
    def ffn(self) -> int:
        """The inner size of a dense layer."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    def parameters(self) -> int:
        """Upper estimate of those of a gated GPT, without norms and biases."""
        return self.layer_parameters(0, self.num_layers) + 2 * self.padded_vocab_size * self.hidden_size

    def layer_parameters(self, first: int, stop: int) -> int:
        """The same of the layers from `first` to before `stop`."""
        hidden, layers, experts = self.hidden_size, stop - first, self.experts()
        attention, dense = 4 * hidden**2, 3 * hidden * self.ffn
        if experts is None:
            return layers * (attention + dense)
        sparse = sum(experts.layers[first:stop])
        return layers * attention + (layers - sparse) * dense + sparse * experts.layer_parameters(hidden)

    def experts(self) -> ExpertShape | None:
        """Its experts by their sizes; None for a dense model."""
        if self.num_experts is None:
            return None
        return ExpertShape(
            count=self.num_experts,
            ffn=self.moe_ffn_hidden_size or self.ffn,
            topk=self.moe_router_topk or ROUTER_TOPK,
            layers=layers_with_experts(self.moe_layer_freq or 1, self.num_layers),
            shared_ffn=self.moe_shared_expert_intermediate_size or 0,
        )
