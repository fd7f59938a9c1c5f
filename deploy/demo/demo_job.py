"""The demo's job: a small GPT that trains with every kind of parallelism in turn. Pure."""

from typing import Any

from agent.protocol.jobfile import DEFAULT_ENTRYPOINT

NAME = "demo-gpt"
PRICE_USD_PER_HOUR = 1.0
STEPS_MAX = 100_000
SEED = 1234
GLOBAL_BATCH = 8
MICRO_BATCH = 4
FIRST_LAYOUT = "TP2xPP2"
THREE_NODES_LAYOUT = "PP3"
SECOND_LAYOUT = "TP2xDP2"
TWO_NODES_LAYOUT = "TP2"
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


def job_file(data_prefix: str) -> dict[str, Any]:
    """What a user would write into job.yaml."""
    return {
        "name": NAME,
        "model": MODEL,
        "args": {"data_prefix": data_prefix, "precision": "fp32", **OPTIMIZER},
        "global_batch": GLOBAL_BATCH,
        "micro_batch": MICRO_BATCH,
        "seed": SEED,
        "nodes": {"min": 2, "max": 4},
        "layouts": {
            "pinned": [
                {"nodes": 4, "layout": FIRST_LAYOUT},
                {"nodes": 4, "layout": SECOND_LAYOUT},
                {"nodes": 3, "layout": THREE_NODES_LAYOUT},
                {"nodes": 2, "layout": TWO_NODES_LAYOUT},
            ],
            "prefer_change": True,
        },
        "stop": {"steps": STEPS_MAX},
    }


def job_spec(data_prefix: str) -> dict[str, Any]:
    """The same job for `deploy.demo.restart.one_process`, which runs it without service and agents."""
    file = job_file(data_prefix)
    return {
        "entrypoint": DEFAULT_ENTRYPOINT,
        "args": file["model"] | file["args"],
        "global_batch": file["global_batch"],
        "micro_batch": file["micro_batch"],
        "seed": file["seed"],
    }
