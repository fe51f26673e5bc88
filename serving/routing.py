"""Routing of calls to replicas by the prefixes that they have cached, and by their load.

This is Preble's E2 (Srivatsa et al. 2024, arXiv:2407.00023, section 3.2). Exploit: a call goes to
the replica that has most of its prompt cached, if that is more than half of the prompt and the
replica is not overloaded. Explore: else to the one of two random replicas that has fewer calls.

    policy = PrefixAndLoad()
    replica = policy.choose(prompt_ids, replicas)[0]
    policy.record(prompt_ids, replica)             # and policy.calls[replica] += 1 while it runs

cluster.py's processes and simulate.py use the policy, Ray Serve a PrefixRouter.

Cost: a hash of each block of a prompt, and a set of replicas for each of `max_blocks` prefixes.
When it loses: prompts without common prefixes, which go to the less loaded of two anyway; replicas
that evict prefixes earlier than they are forgotten here. Equivalence (test_all.py): the rule above,
case by case. Needs nothing; PrefixRouter needs Ray.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of serving/cluster.py; run: python -m serving.cluster --help")

import random
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import Any

try:
    from ray.serve.request_router import FIFOMixin, RequestRouter
except ImportError:  # cluster.start_replicas says so
    FIFOMixin, RequestRouter = type("FIFOMixin", (), {}), object


class PrefixAndLoad:
    """Preble's E2: keeps how many calls each replica has, and which prefixes it was sent."""

    def __init__(self, block_size: int = 16, max_blocks: int = 2**18, imbalance: float = 2.0):
        """max_blocks: prefixes to remember. imbalance: a replica with more than this times the
        fewest calls, plus 4, is overloaded."""
        self.block_size, self.max_blocks, self.imbalance = block_size, max_blocks, imbalance
        self.calls = Counter[Hashable]()  # at present, of each replica
        self.owners: OrderedDict[int, set[Hashable]] = OrderedDict()  # hash of a prefix -> replicas
        self.random = random.Random(0)

    def _prefixes(self, ids: Sequence[int]) -> list[int]:
        """A hash of each prefix of whole blocks."""
        hashes, last = [], 0
        for end in range(self.block_size, len(ids) + 1, self.block_size):
            last = hash((last, *ids[end - self.block_size : end]))
            hashes.append(last)
        return hashes

    def cached(self, ids: Sequence[int]) -> dict[Hashable, int]:
        """Tokens of the prompt that each replica should have in its prefix cache."""
        found: dict[Hashable, int] = {}
        for i, prefix in enumerate(self._prefixes(ids)):
            owners = self.owners.get(prefix, ())
            if not owners:
                break
            found |= dict.fromkeys(owners, (i + 1) * self.block_size)
        return found

    def choose(self, ids: Sequence[int], replicas: Collection[Hashable]) -> list[Hashable]:
        """Of one or more replicas, those for a prompt, the best first."""
        calls = {replica: self.calls[replica] for replica in replicas}
        limit = self.imbalance * min(calls.values()) + 4
        cached = self.cached(ids)
        usable = [r for r in calls if 2 * cached.get(r, 0) > len(ids) and calls[r] <= limit]
        if usable:
            return [max(usable, key=lambda r: (cached[r], -calls[r]))]
        return sorted(self.random.sample(list(calls), min(2, len(calls))), key=calls.get)

    def record(self, ids: Sequence[int], replica: Hashable) -> None:
        """The prompt was sent to a replica."""
        for prefix in self._prefixes(ids):
            self.owners.setdefault(prefix, set()).add(replica)
            self.owners.move_to_end(prefix)
        while len(self.owners) > self.max_blocks:
            self.owners.popitem(last=False)

    def forget(self, replica: Hashable) -> None:
        """A replica has died."""
        for owners in self.owners.values():
            owners.discard(replica)


class PrefixRouter(FIFOMixin, RequestRouter):
    """PrefixAndLoad as a request router of Ray Serve. It counts calls itself: Ray's own cache of
    queue lengths forgets them after 10 s without news."""

    def initialize_state(self) -> None:
        self.policy = PrefixAndLoad()

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        if not replicas:
            return []
        return [[replicas[id]] for id in self.policy.choose(_prompt(pending_request), replicas)]

    def on_send_request(self, replica_id: Hashable) -> None:
        super().on_send_request(replica_id)
        self.policy.calls[replica_id] += 1

    def on_request_routed(self, pending_request: Any, replica_id: Hashable, result: Any) -> None:
        self.policy.record(_prompt(pending_request), replica_id)

    def on_request_completed(self, replica_id: Hashable, internal_request_id: str) -> None:
        self.policy.calls[replica_id] -= 1

    def on_replica_actor_died(self, replica_id: Hashable) -> None:
        super().on_replica_actor_died(replica_id)
        self.policy.forget(replica_id)


def _prompt(pending: Any) -> list[int]:
    """The first prompt of a call of Replica.generate; Replica.describe has none."""
    requests = pending.args[0] if pending is not None and pending.args else []
    return requests[0].ids if requests else []
