"""Networks of a GPU cluster: tiers, switches, transceivers, price, paths, all-to-all.

    network = rail_only(gpus=32768, radix=64, domain=256)
    network.switches, network.transceivers, network.cost, network.path(0, 9)

A network joins NVLink domains of `domain` GPUs, each GPU with a NIC:

    clos            leaves hold neighbouring GPUs; full bisection (Al-Fares et al., SIGCOMM 2008):
                    T tiers of switches with R ports join 2 (R / 2)^T GPUs
    rail-optimized  the same switches, but a leaf holds GPUs of one rail, which is a position in the
                    domain: GPUs of one rail are one switch apart across R / 2 domains, and so are
                    others, after a transfer over NVLink (PXN, NCCL 2.12)
    rail-only       a Clos network per rail and nothing between rails (Wang et al., HotI 2024,
                    arXiv:2307.12169): bytes for another rail always cross NVLink first
    hpn             rail-optimized with two half-rate ports per NIC in two planes, each with its own
                    leaf: 1,024 GPUs in a segment, 15,360 in a pod, 245,760 in all, pods joined
                    through 15:1 oversubscribed links (Qian et al., SIGCOMM 2024, 3 to 6)

Both ends of a link have a transceiver. Not modelled: copper cables, which need none, congestion and
hash collisions (so an all-to-all is a lower bound); the latency between nodes is one constant.
Needs: the standard library.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from planner.cost_model import LINK_EFFICIENCY, Device, all_to_all, require

PORT_PRICE, TRANSCEIVER_PRICE = 694, 199  # $ at 400 Gb/s (arXiv:2307.12169, table II)
# HPN's switches have 51.2 Tb/s: a leaf 128 ports of 200 Gb/s to hosts and 60 of 400 up (5.1), an
# aggregation switch 120 of 400 down, for 8 rails of 15 segments, and 8 up (15:1)
HPN_HOSTS, HPN_UPLINKS, HPN_SEGMENTS, HPN_PODS, HPN_RAILS, HPN_RADIX = 128, 60, 15, 16, 8, 128
HPN_OVERSUBSCRIPTION = 15
LINK_FAILURES, LEAF_FAILURES = 0.00057, 0.00051  # per month, of a NIC's link and of a leaf (HPN, 2)


class Path(NamedTuple):
    """Transfers over NVLink, and switches that a packet crosses."""

    nvlink: int
    switches: int


@dataclass(frozen=True)
class Network:
    """locate: GPU -> (rail, index in the rail), where rails that share a leaf count as one; GPUs
    meet in the first tier t for which their index // spans[t] is the same. rails_apart: nothing
    joins the rails. pod: GPUs with full bandwidth between them, if not all have."""

    name: str
    gpus: int
    domain: int
    switches: int
    radix: int
    transceivers: int
    spans: tuple[int, ...]
    locate: Callable[[int], tuple[int, int]]
    rails_apart: bool = False
    pod: int = 0

    @property
    def tiers(self) -> int:
        return len(self.spans)

    @property
    def cost(self) -> float:
        """$ of all ports and transceivers."""
        return self.switches * self.radix * PORT_PRICE + self.transceivers * TRANSCEIVER_PRICE

    def path(self, a: int, b: int) -> Path:
        """Within a domain over NVLink. Between rails over NVLink first, if nothing else joins them
        or if that keeps the packet in one leaf."""
        if a // self.domain == b // self.domain:
            return Path(int(a != b), 0)
        (rail, i), (other, j) = self.locate(a), self.locate(b)
        tier = next(t for t, span in enumerate(self.spans) if i // span == j // span)
        first = rail != other and (self.rails_apart or tier == 0 and self.tiers > 1)
        return Path(int(first), 2 * tier + 1)

    def transfer_seconds(self, a: int, b: int, size: float, device: Device) -> float:
        """Seconds of `size` bytes from a to b: latencies and the slowest link."""
        nvlink, switches = self.path(a, b)
        wires = [device.nvlink] * nvlink + [device.network] * (switches > 0)
        latency = nvlink * device.alpha[0] + (switches > 0) * device.alpha[1]
        return latency + size / LINK_EFFICIENCY / min(wires) if wires else 0.0

    def all_to_all_seconds(self, size: float, device: Device) -> float:
        """Seconds of an all-to-all of `size` bytes per GPU over NVLink and NICs at once. With rails
        apart, bytes for other rails cross NVLink first (arXiv:2307.12169); bytes for other pods
        share oversubscribed links."""
        n, d = self.gpus, min(self.domain, self.gpus)
        seconds, size = all_to_all(size, n, 1, device), size / LINK_EFFICIENCY
        if self.pod and n > self.pod:
            beyond = size * (n - self.pod) / n
            seconds = max(seconds, beyond * HPN_OVERSUBSCRIPTION / device.network)
        forwarded = size * (n - d) / n * (d - 1) / d if self.rails_apart else 0.0
        return seconds + forwarded / device.nvlink


def clos_tiers(gpus: int, radix: int) -> int:
    """Tiers of the smallest non-blocking network: the first T with 2 (radix / 2)^T >= gpus."""
    tiers = 1
    while 2 * (radix // 2) ** tiers < gpus:
        tiers += 1
    return tiers


def clos_switches(gpus: int, radix: int, leaves: int = 0) -> int:
    """Switches of a non-blocking network: half of the ports go down, in the last tier all of them.
    leaves: their number, if it is not the least."""
    tiers, leaves = clos_tiers(gpus, radix), leaves or -(-gpus // (radix // 2))
    return 1 if tiers == 1 else leaves * (tiers - 1) + -(-leaves // 2)


def clos_spans(gpus: int, radix: int) -> tuple[int, ...]:
    """Endpoints below a switch of each tier; below the last are all."""
    return (*((radix // 2) ** t for t in range(1, clos_tiers(gpus, radix))), gpus)


def clos(gpus: int, radix: int, domain: int) -> Network:
    """GPUs in order, whatever their domain."""
    spans = clos_spans(gpus, radix)
    switches, ends = clos_switches(gpus, radix), 2 * len(spans) * gpus
    return Network("clos", gpus, domain, switches, radix, ends, spans, lambda gpu: (0, gpu))


def rail_optimized(gpus: int, radix: int, domain: int) -> Network:
    """A leaf has radix / 2 GPUs of one rail, or several whole rails of few domains; all rails of
    the same domains lie side by side."""
    half, nodes = radix // 2, -(-gpus // domain)
    shared = max(1, half // nodes)  # rails of a leaf
    leaves = -(-domain // shared) * -(-nodes // half)
    spans = clos_spans(gpus if gpus <= radix else leaves * half, radix)
    switches, ends = clos_switches(spans[-1], radix, leaves), 2 * len(spans) * gpus
    if len(spans) > 1:
        spans = (half, *(max(half, span // domain) for span in spans[1:-1]), gpus)
    locate = lambda gpu: (gpu % domain // shared, gpu // domain)
    return Network("rail-optimized", gpus, domain, switches, radix, ends, spans, locate)


def rail_only(gpus: int, radix: int, domain: int) -> Network:
    """`domain` Clos networks, one per rail."""
    nodes = -(-gpus // domain)
    spans, locate = clos_spans(nodes, radix), lambda gpu: (gpu % domain, gpu // domain)
    switches, ends = domain * clos_switches(nodes, radix), 2 * len(spans) * gpus
    return Network("rail-only", gpus, domain, switches, radix, ends, spans, locate, True)


def hpn(gpus: int) -> Network:
    """Alibaba's network of hosts with 8 GPUs. Links: two per GPU, the leaves' uplinks and those of
    the aggregation switches. ValueError beyond 16 pods."""
    segment = HPN_HOSTS * HPN_RAILS
    pod = segment * HPN_SEGMENTS
    require(gpus <= pod * HPN_PODS, f"hpn joins at most {pod * HPN_PODS} GPUs, not {gpus}")
    segments, pods = -(-gpus // segment), -(-gpus // pod)
    leaves, tops = 2 * HPN_RAILS * segments, 2 * HPN_UPLINKS * pods * (segments > 1)
    up = tops * HPN_RADIX // (HPN_OVERSUBSCRIPTION + 1) * (pods > 1)
    switches = leaves + tops + -(-up // HPN_RADIX)
    links = 2 * gpus + leaves * HPN_UPLINKS * (segments > 1) + up
    spans = (HPN_HOSTS, HPN_HOSTS * HPN_SEGMENTS, gpus)[: 1 + (segments > 1) + (pods > 1)]
    locate = lambda gpu: (gpu % HPN_RAILS, gpu // HPN_RAILS)
    return Network("hpn", gpus, HPN_RAILS, switches, HPN_RADIX, 2 * links, spans, locate, pod=pod)


def crashes_per_month(gpus: int, radix: int, dual: bool = False) -> float:
    """Crashes of a job on `gpus` GPUs from failed NIC links and leaves. dual: two leaves per NIC,
    so that the second must fail in the day in which the first is repaired (HPN, 2 and 4)."""
    leaves = -(-gpus // (radix // 2))
    if not dual:
        return gpus * LINK_FAILURES + leaves * LEAF_FAILURES
    return gpus * 2 * (LINK_FAILURES + LEAF_FAILURES) ** 2 / 30


def compare(
    device: Device, gpus: int, radix: int, pair: tuple[int, int], size: float = 1e9
) -> list[dict[str, Any]]:
    """A row per network: counts, $, the path between a pair of GPUs, and ms of `size` bytes on it
    and of an all-to-all of `size` bytes per GPU. ValueError for a radix that is odd or below 4."""
    require(radix >= 4 and radix % 2 == 0, f"--radix {radix} is not an even number from 4")
    require(max(pair) < gpus, f"--pair {pair[0]},{pair[1]}: GPUs are numbered 0 to {gpus - 1}")
    domain = min(device.node, gpus)
    networks = [make(gpus, radix, domain) for make in (clos, rail_optimized, rail_only)]
    if domain == HPN_RAILS and gpus <= HPN_HOSTS * HPN_RAILS * HPN_SEGMENTS * HPN_PODS:
        networks.append(hpn(gpus))
    return [
        {
            "name": net.name, "tiers": net.tiers, "switches": net.switches,
            "transceivers": net.transceivers, "cost": net.cost,
            "nvlink": net.path(*pair).nvlink, "crossed": net.path(*pair).switches,
            "pair_ms": 1e3 * net.transfer_seconds(*pair, size, device),
            "all_to_all_ms": 1e3 * net.all_to_all_seconds(size, device),
        }  # fmt: skip
        for net in networks
    ]


def table(rows: list[dict[str, Any]], pair: tuple[int, int]) -> str:
    """The rows of `compare`: a path is NVLink transfers, then switches; ms are of 1 GB."""
    counts = f"{'network':<15}{'tiers':>6}{'switches':>10}{'transceivers':>14}{'M$':>8}"
    lines = [f"{counts}{f'{pair[0]} to {pair[1]}':>17}{'ms':>7}{'all-to-all':>12} ms"]
    for row in rows:
        cells = f"{row['name']:<15}{row['tiers']:>6}{row['switches']:>10,}"
        cells += f"{row['transceivers']:>14,}{row['cost'] / 1e6:>8.2f}"
        path = f"nvlink {row['nvlink']} + {row['crossed']}"
        lines.append(f"{cells}{path:>17}{row['pair_ms']:>7.1f}{row['all_to_all_ms']:>15.1f}")
    return "\n".join(lines)
