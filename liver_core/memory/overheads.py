"""What a rank takes on its device beside state and activations: contexts, workspaces, NCCL, the certificate. Pure.

Estimates, made before anything runs; where a rank can ask its device it goes by the answer instead.
"""

from __future__ import annotations

from dataclasses import dataclass

CERTIFICATE_WORDS = 4 * 2**20
"""So many words of 64 bits are summed at once: a pass over them takes far longer than to launch it."""
CERTIFICATE_TENSORS = 5
"""Of so many words each: three, and two more where a region's rows are short (`certificate.on_device`)."""
MIB = 2**20
LANDING_BYTES = 32 * MIB
"""What is read from other GPUs lands in so much on this one where its target waits in host memory."""


@dataclass(frozen=True, slots=True)
class DeviceOverheads:
    """Bytes on the device of one rank.

    context: of the process, with the code of all kernels. workspaces: cuBLAS takes 32 MiB for each stream that
    multiplies (NVIDIA, cuBLAS documentation, `cublasSetWorkspace`); training's does, and that of a replayed step may.
    nccl_per_world: the communicators of one world, which share the resources of one (`worlds.nccl_groups`); 7 GB where
    each has its own (measured by others on 8 H100s in TP2xPP2xDP2). A world of one rank has none. certificate: while
    the state is summed. landing: while state is read for host memory. relay: context of the stream relay of this node,
    which all handoffs count, though one inside a node starts none. A context alone: a relay loads no kernels.
    """

    context: int = 500_000_000
    workspaces: int = 2 * 32 * MIB
    nccl_per_world: int = 2_000_000_000
    certificate: int = CERTIFICATE_TENSORS * CERTIFICATE_WORDS * 8
    landing: int = LANDING_BYTES
    relay: int = 500_000_000

    def nccl(self, world_size: int) -> int:
        """Of one world."""
        return self.nccl_per_world if world_size > 1 else 0


def default_budget(free_bytes: int, total_bytes: int, world_size: int, overheads: DeviceOverheads | None = None) -> int:
    """What a handoff may add to a device of which `free_bytes` of `total_bytes` are free, where no limit is given.

    Free is what the driver says while the present world trains: what its steps need at their peak is not free. Left out
    are the communicators of the next world, the certificate, where reads land that go on to host memory, a relay's
    context, and a part of the device that its allocator may lose between blocks.
    """
    overheads = overheads or DeviceOverheads()
    taken = overheads.nccl(world_size) + overheads.certificate + overheads.landing + overheads.relay
    return max(0, free_bytes - taken - total_bytes // SCATTERED_SHARE)


SCATTERED_SHARE = 64
"""One part of so many of a device."""
NCCL_UNSHARED_BYTES = 7_000_000_000
"""Of one world whose groups share no communicator."""
