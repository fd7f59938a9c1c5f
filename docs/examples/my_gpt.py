"""A GPT of your own under LiveR: own model, own text file, own schedule. See docs/port.md."""

import math
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from liver_core.training.megatron_job import MegatronJob, config_for, finish_build


class WarmupCosine:
    """Learning rate by step; all it remembers is the number of steps."""

    def __init__(self, optimizer, peak, warmup, total):
        self.optimizer, self.peak, self.warmup, self.total, self.steps = optimizer, peak, warmup, total, 0
        self.step(0)

    def step(self, increment):
        self.steps += increment
        done = min(1.0, max(0.0, (self.steps - self.warmup) / (self.total - self.warmup)))
        rate = self.peak * min(1.0, (self.steps + 1) / self.warmup) * (0.55 + 0.45 * math.cos(math.pi * done))
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]
        self.step(0)


class MyGpt(MegatronJob):
    def __init__(self, args, *, global_batch, micro_batch, seed):
        self.args, self.global_batch, self.micro_batch, self.seed = args, global_batch, micro_batch, seed
        self.seq_length = args["seq_length"]
        self.text = None

    def warm_up(self):
        self.text = torch.frombuffer(bytearray(Path(self.args["text"]).read_bytes()), dtype=torch.uint8)

    def samples(self, sample_ids):
        """Sample n is a window of the file whose place depends on n and the seed only."""
        draws = (torch.Generator().manual_seed(self.seed * 1_000_003 + number) for number in sample_ids)
        last = len(self.text) - self.seq_length
        starts = [int(torch.randint(last, (1,), generator=draw)) for draw in draws]
        return torch.stack([self.text[start : start + self.seq_length + 1] for start in starts]).long()

    def build(self, world):
        args, stage = self.args, world.coordinates.pp
        config = TransformerConfig(
            **config_for(world, torch.float32),
            num_layers=args["num_layers"],
            hidden_size=args["hidden_size"],
            num_attention_heads=args["num_attention_heads"],
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=args["padded_vocab_size"],
            max_sequence_length=self.seq_length,
            pre_process=stage == 0,
            post_process=stage == world.layout.pp - 1,
            position_embedding_type="rope",
            pg_collection=world.collection,
        )
        adam = OptimizerConfig(optimizer="adam", lr=args["lr"], clip_grad=1.0, use_distributed_optimizer=True)
        state = finish_build(world, config, model, optimizer=adam)
        state.scheduler = WarmupCosine(state.optimizer, args["lr"], warmup=20, total=args["total_steps"])
        return state

    def forward(self, model, batch):
        tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        positions = torch.arange(self.seq_length, device=tokens.device).expand_as(tokens)
        return model(tokens, positions, self.causal_mask(), labels=labels)

    def loss(self, output, batch):
        return output.float().mean()

    def initial_parameter(self, spec, generator):
        if len(spec.shape) == 1:
            return torch.zeros(spec.shape) if spec.name.endswith("bias") else torch.ones(spec.shape)
        return torch.randn(spec.shape, generator=generator) * 0.02
