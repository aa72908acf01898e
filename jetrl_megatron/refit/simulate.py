"""A refit on a cluster that is not at hand: every byte of the plan over the link that it would take.

Time is that of the fullest link, as if all links ran at once at the given bandwidths: a lower bound that tells which
link to look at. Trainer ranks fill nodes of GPUs in order, replicas fill the nodes after them, or the same ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from jetrl_conversion.layout import Layout, local_shapes
from jetrl_conversion.model_spec import ModelSpec
from jetrl_conversion.planner import plan_reshard
from jetrl_megatron.refit.places import Places


@dataclass(frozen=True)
class Link:
    """The fullest of its kind."""

    kind: str
    """`network out`, `network in` (a GPU's adapter), `nvlink out`, `nvlink in`."""
    gpu: int
    """Counted over the cluster; `gpu // GPUs of a node` is its node."""
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Simulation:
    bound: int
    """Bytes that the replicas hold, once for each node with replicas."""
    network: int
    """Bytes that change the node."""
    links: tuple[Link, ...]
    """Fullest first."""
    gather: float
    """Seconds for gathering BF16 tensors on one GPU and broadcasting them: that GPU's adapter, in and out."""
    gather_fp8: float

    @property
    def seconds(self) -> float:
        return self.links[0].seconds if self.links else 0.0


def simulate(
    spec: ModelSpec,
    source: Layout,
    replica: Layout,
    replicas: int,
    *,
    colocated: bool,
    gpus_per_node: int,
    nvlink: float,
    network: float,
) -> Simulation:
    """
    Args:
        nvlink, network: bytes/s of one GPU, one direction.

    Raises:
        LayoutError: an impossible layout. ValueError: a replica would not lie on one node.
    """
    tp, world = replica.world, source.world
    if gpus_per_node % tp:
        raise ValueError(f"replicas of {tp} GPUs do not fill nodes of {gpus_per_node}")
    first = 0 if colocated else -(-world // gpus_per_node)
    per_node = gpus_per_node // tp
    places = Places(
        tuple(rank // gpus_per_node for rank in range(world)),
        tuple(first + i // per_node for i in range(replicas)),
        tp,
        tp,
    )
    target = Layout("vllm", tp=replica.tp, ep=replica.ep, dp=len(places.copies))
    plan = plan_reshard(spec, source, target, nodes=(places.trainers, places.destinations))
    load: Counter[tuple[str, int]] = Counter()
    crossing = 0
    for dst in range(target.world):
        node, number = places.destinations[dst], dst % tp
        readers = [node * gpus_per_node + r * tp + number for r in range(len(places.on(node)))]
        far = {places.trainers[t.src_rank] for t in plan.receives(dst)} - {node}
        # Where anything comes from elsewhere, all of it lands on one GPU, from which the node's replicas read.
        member = places.receiver(dst)
        landing = member if member < world else node * gpus_per_node + number
        for transfer in plan.receives(dst):
            at = places.trainers[transfer.src_rank]
            here = [landing] if far else readers
            for reader in here:
                if at != node:
                    load["network out", transfer.src_rank] += transfer.nbytes
                    load["network in", reader] += transfer.nbytes
                    crossing += transfer.nbytes
                elif transfer.src_rank != reader:
                    load["nvlink out", transfer.src_rank] += transfer.nbytes
                    load["nvlink in", reader] += transfer.nbytes
        if far:
            whole = sum(t.nbytes for t in plan.receives(dst))
            for reader in readers:
                if reader != landing:
                    load["nvlink out", landing] += whole
                    load["nvlink in", reader] += whole
    rate = {"network": network, "nvlink": nvlink}
    fullest: dict[str, Link] = {}
    for (kind, gpu), nbytes in load.items():
        if kind not in fullest or nbytes > fullest[kind].nbytes:
            fullest[kind] = Link(kind, gpu, nbytes, nbytes / rate[kind.split()[0]])
    bf16 = 2 * sum(_size(shape) for shape in local_shapes(spec, Layout("hf"), 0).values())
    fp8 = plan_reshard(spec, source, Layout("vllm")).total_bytes
    return Simulation(
        plan.total_bytes,
        crossing,
        tuple(sorted(fullest.values(), key=lambda link: -link.seconds)),
        2 * bf16 / network,
        2 * fp8 / network,
    )


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
