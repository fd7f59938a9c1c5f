"""Imported once by the zygote: everything a rank needs that takes seconds to import. Starts no thread."""

import warnings

# Megatron asks non-leaf shards for their gradient on purpose, once a step, and says at import what is not installed.
warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*")

import torch  # noqa: E402

from liver_core.device.unasked import cuda_unasked  # noqa: E402
from liver_core.worlds import cpu_compat  # noqa: E402

torch.set_num_threads(1)
with cuda_unasked() as gpu_is_here:
    if not gpu_is_here:
        cpu_compat.apply()
    # Megatron binds names when it is imported, so the patches come first.
    from liver_core.rank import loop
    from liver_core.training import gpt
    from liver_core.transport import endpoint, nixl

__all__ = ["endpoint", "gpt", "loop", "nixl"]
