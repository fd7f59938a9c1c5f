"""The demo's jobs: small GPTs that train with every kind of parallelism in turn. Pure."""

from dataclasses import dataclass
from typing import Any

from agent.protocol.jobfile import DEFAULT_ENTRYPOINT

PRICE_USD_PER_HOUR = 1.0
STEPS_MAX = 100_000
SEED = 1234
GLOBAL_BATCH = 8
MICRO_BATCH = 4
# Slow learning, so that two runs that differ only by rounding stay close; otherwise rounding would hide a defect.
OPTIMIZER = {"lr": 2e-4, "warmup_steps": 50, "adam_eps": 1e-5}
MODEL = {
    "num_layers": 12,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "ffn_hidden_size": 384,
    # 257 byte tokens, padded to a multiple that every tensor parallel size divides.
    "padded_vocab_size": 264,
    "seq_length": 64,
}
EXPERTS = {"num_experts": 8, "moe_ffn_hidden_size": 96, "moe_router_topk": 2}
BALANCED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-3,
}


@dataclass(frozen=True, slots=True)
class DemoJob:
    """One job of the demo. `model`, `args`: parts of its job file. `layouts`: on four nodes at first, on three, on four
    again, on two. `loss_share`: what losses may differ by beyond rounding, some steps after a handoff. A router sends a
    token to those experts that come first, so that a rounding difference sends it elsewhere where two are level."""

    name: str
    what: str
    model: dict[str, Any]
    args: dict[str, Any]
    layouts: tuple[str, str, str, str]
    loss_share: float = 0.0

    @property
    def first_layout(self) -> str:
        """Of the four nodes that it starts on."""
        return self.layouts[0]

    @property
    def other_layout(self) -> str:
        """Of the three nodes that are left after the first loss."""
        return self.layouts[1]

    def file(self, data_prefix: str) -> dict[str, Any]:
        """What a user would write into job.yaml."""
        first, three, second, two = self.layouts
        return {
            "name": self.name,
            "model": self.model,
            "args": {"data_prefix": data_prefix, "precision": "fp32", **OPTIMIZER, **self.args},
            "global_batch": GLOBAL_BATCH,
            "micro_batch": MICRO_BATCH,
            "seed": SEED,
            "nodes": {"min": 2, "max": 4},
            "layouts": {
                "pinned": [
                    {"nodes": 4, "layout": first},
                    {"nodes": 4, "layout": second},
                    {"nodes": 3, "layout": three},
                    {"nodes": 2, "layout": two},
                ],
                "prefer_change": True,
            },
            "stop": {"steps": STEPS_MAX},
        }

    def spec(self, data_prefix: str) -> dict[str, Any]:
        """The same job for `deploy.demo.restart.one_process`, which runs it without service and agents."""
        file = self.file(data_prefix)
        return {
            "entrypoint": DEFAULT_ENTRYPOINT,
            "args": file["model"] | file["args"],
            "global_batch": file["global_batch"],
            "micro_batch": file["micro_batch"],
            "seed": file["seed"],
        }


DENSE = DemoJob("demo-gpt", "a GPT", MODEL, {}, ("TP2xPP2", "PP3", "TP2xDP2", "TP2"))
MOE = DemoJob(
    "demo-moe",
    "a GPT with eight experts a layer",
    MODEL | EXPERTS,
    BALANCED,
    ("PP2xDP2xEP2", "PP3", "TP2xDP2xEP2", "DP2xEP2"),
    loss_share=5e-3,
)
