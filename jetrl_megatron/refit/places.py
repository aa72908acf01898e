"""Who is where: nodes of trainer ranks and replicas, and who receives the bytes of each node's engines.

Replicas on one node share one set of bytes, a *copy* of the model: one landing place for each of a replica's ranks.
Trainer ranks of the node receive it or, on a node without trainers, that node's host processes
(`jetrl_megatron.rollout.host`): one, or on GPUs one for each rank of a replica, so that every network adapter takes its
part. Trainer ranks and host processes are the *members* of a refit, numbered in this order.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

from jetrl_megatron.config import Config


@dataclass(frozen=True)
class Places:
    """
    Args:
        trainers: node of each trainer rank.
        replicas: node of each replica.
        tp: ranks of one replica.
        hosts_per_node: host processes of a node without trainers.
    """

    trainers: tuple[int, ...]
    replicas: tuple[int, ...]
    tp: int
    hosts_per_node: int = 1

    @staticmethod
    def of(config: Config, ranks_per_node: int, gpu: bool = False) -> Places:
        """Places of a run: trainer ranks fill nodes in order, replicas are spread evenly over the nodes that sample."""
        trainers = tuple(rank // ranks_per_node for rank in range(config.parallel.world_size))
        first = trainers[-1] + 1
        nodes = range(first, first + config.rollout.nodes) if config.rollout.nodes else range(first)
        count = config.rollout.replicas
        replicas, tp = tuple(nodes[i * len(nodes) // count] for i in range(count)), config.rollout.tp
        return Places(trainers, replicas, tp, tp if gpu else 1)

    @staticmethod
    def here(config: Config, gpu: bool = False) -> Places:
        """Places of the run that this torchrun rank belongs to."""
        return Places.of(config, int(os.environ.get("LOCAL_WORLD_SIZE", config.parallel.world_size)), gpu)

    @cached_property
    def copies(self) -> tuple[int, ...]:
        """Nodes with replicas, each of which gets one copy of the model."""
        return tuple(dict.fromkeys(self.replicas))

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """Node of each host process."""
        nodes = (node for node in self.copies if node not in self.trainers)
        return tuple(node for node in nodes for _ in range(self.hosts_per_node))

    @property
    def members(self) -> int:
        return len(self.trainers) + len(self.hosts)

    @cached_property
    def destinations(self) -> tuple[int, ...]:
        """Node of each destination rank: rank `c * tp + t` is rank `t` of copy `c`."""
        return tuple(node for node in self.copies for _ in range(self.tp))

    def receiver(self, dst_rank: int) -> int:
        """The member that receives for a destination rank: the trainer ranks of its node take turns."""
        node = self.destinations[dst_rank]
        if node in self.trainers:
            return self.trainers.index(node) + dst_rank % self.tp % self.trainers.count(node)
        return len(self.trainers) + self.hosts.index(node) + dst_rank % self.tp % self.hosts_per_node

    def ranks_on(self, node: int) -> list[int]:
        """Destination ranks of a node's copy, in the order of a replica's ranks."""
        return [dst for dst, at in enumerate(self.destinations) if at == node]

    def node(self, member: int) -> int:
        count = len(self.trainers)
        return self.trainers[member] if member < count else self.hosts[member - count]

    def near(self, src_rank: int, dst_rank: int) -> bool:
        """Whether a trainer rank shares the node of a destination rank."""
        return self.trainers[src_rank] == self.destinations[dst_rank]

    def on(self, node: int) -> tuple[int, ...]:
        """Replicas of a node."""
        return tuple(i for i, at in enumerate(self.replicas) if at == node)
