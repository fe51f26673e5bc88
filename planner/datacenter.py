"""A site and its runs: energy, failures, servers per row, networks, and the model of a budget.

    python -m planner site --gpus 16384 --device h100 --days 54
    run = estimate_run(shape, device, predict(...), seq, batch, tokens=15.6e12)
    run["days"], run["mwh"], run["mtbf_hours"], run["goodput"]
    network = rail_only(gpus=32768, radix=64, domain=256)
    network.switches, network.transceivers, network.cost, network.path(0, 9)
    optimal_models(5.76e23)["chinchilla 1"]     # {"parameters": 6.9e10, "tokens": 1.4e12, ...}

Energy is hours x GPUs x watts x PUE (Patterson et al., arXiv:2104.10350). With a device's own
watts, the most that a server takes, it is an upper bound; with a measured average (--watts) an
estimate. Failures are independent and follow each other at a constant rate, so the time between
them falls as 1 / GPUs (Kokolis et al., arXiv:2410.21680): right for the largest jobs; small jobs
fail several times as often as that says, for reasons other than hardware. A row of servers is
oversubscribed as in POLCA (Patel et al., ASPLOS 2024).

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

Training costs C = 6 N D FLOPs (Kaplan et al., arXiv:2001.08361, 2.1). Three answers, which differ:

    kaplan        N = 1.3e9 C^0.73 with C in PF-days (table 6): most of a larger budget goes to a
                  larger model; N is without the embedding
    chinchilla 1  20 tokens per parameter (Hoffmann et al., arXiv:2203.15556, 3.1: N and D grow with
                  the square root of C; the ratio is table 3's)
    chinchilla 3  the minimum of L(N, D) = 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28 (3.3), in closed
                  form; with these rounded constants N is half of approach 1's at Gopher's budget

The losses are of other data and tokenizers than each other's and yours. All laws were fitted to
models below 20B parameters, and none counts inference, for which smaller models are trained longer.
Needs: the standard library.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from planner.cost_model import (
    LINK_EFFICIENCY,
    Device,
    Shape,
    all_to_all,
    load_cluster,
    model_flops,
    parameters,
    parse_number,
    require,
)
from planner.flags import add_shared
from planner.training_plan import Prediction

# Unexpected interruptions of Llama 3 405B: 54 days, 16,384 H100 (arXiv:2407.21783, table 5)
INTERRUPTIONS = {
    "GPU": 148, "HBM": 72, "software": 54, "network switch or cable": 35, "host maintenance": 32,
    "GPU SRAM": 19, "GPU system processor": 17, "NIC": 7, "NCCL watchdog": 7,
    "silent data corruption": 6, "GPU thermal interface": 6, "SSD": 3, "power supply": 3,
    "server chassis": 2, "IO expansion board": 2, "dependency": 2, "CPU": 2, "system memory": 2,
}  # fmt: skip
GPU_HOURS_TO_FAILURE = 54 * 24 * 16384 / sum(INTERRUPTIONS.values())
STORAGE_BANDWIDTH = 2e12 / 16384  # bytes/s per GPU: Llama 3's, 2 TB/s sustained (3.3.1)
RESTART_SECONDS = 600.0  # to detect a failure, reschedule and load
PUE = 1.1  # site energy / IT energy: Azure's for GPT-3 (arXiv:2104.10350, table 4)
CARBON = 0.429  # kg of CO2e per kWh: the average of the US (2104.10350, 2.4)
ENERGY_PRICE = 0.078  # $ per kWh (SemiAnalysis, 100,000 H100 Clusters, June 2024)
OTHER_IT = 0.10  # storage, switches, CPU nodes and optics over servers' power (same article)
TRAINING_MFU = 0.40  # of a budget given as GPUs and days; Llama 3's runs: 0.38 to 0.43

# Power of a DGX A100 in inference: POLCA's characterization (ASPLOS 2024; arXiv:2308.12908)
GPU_POWER_SHARE = 0.5  # GPUs' share of a server's power
TOKEN_GPU_POWER = 0.5  # decoding is as fast at half the GPU's power (Splitwise, ISCA 2024, 3.6)
CAPPED_GPU_POWER = 0.8  # 20% less peak power for at most 7% of prompt speed
CAP_SPIKE = 0.118  # largest rise of a row's power in the 40 s that a cap takes to act


# --------------------------------------------------------------------------------------------------
# Energy
# --------------------------------------------------------------------------------------------------


def energy_mwh(gpus: float, hours: float, watts: float, pue: float = PUE) -> float:
    """MWh of a site: hours x GPUs x watts (of a GPU and its share of the server) x PUE
    (arXiv:2104.10350)."""
    return hours * gpus * watts * pue / 1e6


def co2_tonnes(mwh: float, carbon: float = CARBON) -> float:
    """Tonnes of CO2e at `carbon` kg per kWh, which are tonnes per MWh."""
    return mwh * carbon


def site_megawatts(gpus: int, watts: float, pue: float = PUE) -> dict[str, float]:
    """MW of the servers, of all IT (storage, switches, CPU nodes, optics: OTHER_IT more) and of the
    site with its cooling."""
    servers = gpus * watts / 1e6
    return {
        "servers": servers, "it": servers * (1 + OTHER_IT), "site": servers * (1 + OTHER_IT) * pue
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Failures and checkpoints
# --------------------------------------------------------------------------------------------------


def mtbf_hours(gpus: int, per_1000_node_days: float, node: int = 8) -> float:
    """Hours between failures of a job: 1 / (nodes x rate) (arXiv:2410.21680). Meta's clusters
    had 6.50 (RSC-1) and 2.34 (RSC-2) failures per 1000 node-days, Llama 3's run 3.79."""
    return 24 * 1000 * node / (per_1000_node_days * gpus)


def component_mtbf_hours(hours: float) -> dict[str, float]:
    """Hours between failures of each component, of a job that fails every `hours`, with Llama 3's
    shares."""
    return {part: hours * sum(INTERRUPTIONS.values()) / n for part, n in INTERRUPTIONS.items()}


def checkpoint_interval(cost: float, mtbf: float) -> float:
    """Optimal seconds between checkpoints: sqrt(2 C M) (Young, CACM 1974; Daly, FGCS 2006, whose
    higher-order terms vanish for C << M)."""
    return math.sqrt(2 * cost * mtbf)


def goodput(cost: float, mtbf: float, interval: float, restart: float = RESTART_SECONDS) -> float:
    """Fraction of time spent training: without the checkpoints' cost and, per failure, half an
    interval of lost work and the restart."""
    return max(0.0, 1 - cost / interval - (interval / 2 + restart) / mtbf)


def checkpointing(shape: Shape, gpus: int, mtbf: float, storage: float) -> dict[str, float]:
    """Bytes of a checkpoint (fp32 weights and two moments), seconds to write it at `storage`
    bytes/s per GPU, seconds from one to the next, and the goodput. mtbf: seconds."""
    size = 12.0 * parameters(shape)
    cost = size / (storage * gpus)
    interval = checkpoint_interval(cost, mtbf)
    return {
        "mtbf_hours": mtbf / 3600, "checkpoint_bytes": size, "checkpoint_seconds": cost,
        "checkpoint_interval": interval, "goodput": goodput(cost, mtbf, interval),
    }  # fmt: skip


def estimate_run(
    shape: Shape, device: Device, got: Prediction, seq: int, batch: int, tokens: float,
    storage: float = STORAGE_BANDWIDTH,
) -> dict[str, float]:  # fmt: skip
    """A run of `tokens`: FLOPs (6 N D and attention; Kaplan, arXiv:2001.08361, 2.1), days with
    failures, MWh of its servers at their maximum power (an upper bound), hours between
    failures, and `checkpointing`. ValueError if failures leave no time to train."""
    gpus = got.plan.gpus
    saved = checkpointing(shape, gpus, GPU_HOURS_TO_FAILURE * 3600 / gpus, storage)
    cost, mtbf = saved["checkpoint_seconds"], saved["mtbf_hours"]
    text = f"no progress: a checkpoint takes {cost:.0f} s, failures are {mtbf:.3g} h apart"
    require(saved["goodput"], f"{text}; use more --storage or fewer --gpus")
    days = tokens / (batch * seq) * got.step / 86400 / saved["goodput"]
    mwh = energy_mwh(gpus, days * 24, device.watts)
    flops = model_flops(shape, seq) * tokens
    return {"tokens": tokens, "flops": flops, "days": days, "mwh": mwh, **saved}


# --------------------------------------------------------------------------------------------------
# Servers per row
# --------------------------------------------------------------------------------------------------


def phase_power(capped: bool = False) -> tuple[float, float]:
    """Power of a server in (the prompt phase, the token phase), of its maximum. The prompt phase
    takes all; capped, its GPUs take CAPPED_GPU_POWER of theirs."""
    server = lambda gpu: 1 - GPU_POWER_SHARE * (1 - gpu)
    return server(CAPPED_GPU_POWER if capped else 1.0), server(TOKEN_GPU_POWER)


def cap_threshold(spike: float = CAP_SPIKE) -> float:
    """Share of a row's power at which to cap: power that rises by `spike` until the cap acts must
    stay below the row's (POLCA's T2)."""
    return 1 / (1 + spike)


def overload_risk(servers: int, row: float, prompt: float, capped: bool = False) -> float:
    """Probability that `servers` take more than a row provisioned for `row` of them. Each is in the
    prompt phase with probability `prompt`, independent of the others."""
    high, low = phase_power(capped)
    fits = math.floor((row - servers * low) / (high - low) + 1e-9)  # servers in the prompt phase
    if fits >= servers:
        return 0.0
    below = sum(
        math.comb(servers, k) * prompt**k * (1 - prompt) ** (servers - k) for k in range(fits + 1)
    )
    return max(0.0, 1 - below)


def servers_per_row(row: int, prompt: float, risk: float, capped: bool = False) -> int:
    """The most servers whose `overload_risk` is at most `risk`, in a row provisioned for `row`."""
    servers = row
    while overload_risk(servers + 1, row, prompt, capped) <= risk:
        servers += 1
    return servers


# --------------------------------------------------------------------------------------------------
# Networks of a cluster
# --------------------------------------------------------------------------------------------------

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


def compare_networks(
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
            "name": net.name,
            "tiers": net.tiers,
            "switches": net.switches,
            "transceivers": net.transceivers,
            "cost": net.cost,
            "nvlink": net.path(*pair).nvlink,
            "crossed": net.path(*pair).switches,
            "pair_ms": 1e3 * net.transfer_seconds(*pair, size, device),
            "all_to_all_ms": 1e3 * net.all_to_all_seconds(size, device),
        }  # fmt: skip
        for net in networks
    ]


def network_table(rows: list[dict[str, Any]], pair: tuple[int, int]) -> str:
    """The rows of `compare_networks`: a path is NVLink transfers, then switches; ms are of 1 GB."""
    counts = f"{'network':<15}{'tiers':>6}{'switches':>10}{'transceivers':>14}{'M$':>8}"
    lines = [f"{counts}{f'{pair[0]} to {pair[1]}':>17}{'ms':>7}{'all-to-all':>12} ms"]
    for row in rows:
        cells = f"{row['name']:<15}{row['tiers']:>6}{row['switches']:>10,}"
        cells += f"{row['transceivers']:>14,}{row['cost'] / 1e6:>8.2f}"
        path = f"nvlink {row['nvlink']} + {row['crossed']}"
        lines.append(f"{cells}{path:>17}{row['pair_ms']:>7.1f}{row['all_to_all_ms']:>15.1f}")
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# Scaling laws: the model and the tokens that a budget of FLOPs is best spent on
# --------------------------------------------------------------------------------------------------

PF_DAY = 1e15 * 86400  # FLOPs
TOKENS_PER_PARAMETER = 20
E, A, B, ALPHA, BETA = 1.69, 406.4, 410.7, 0.34, 0.28
N_C, ALPHA_N = 8.8e13, 0.076  # arXiv:2001.08361, 1.2
D_C, ALPHA_D = 5.4e13, 0.095


def chinchilla_loss(n: float, d: float) -> float:
    """Nats per token of n parameters trained on d tokens (arXiv:2203.15556, 3.3)."""
    return E + A / n**ALPHA + B / d**BETA


def kaplan_loss(n: float, d: float) -> float:
    """[(N_c / N)^(a_N / a_D) + D_c / D]^a_D (arXiv:2001.08361, equation 1.5); with unlimited data
    (N_c / N)^a_N, with an unlimited model (D_c / D)^a_D."""
    return ((N_C / n) ** (ALPHA_N / ALPHA_D) + D_C / d) ** ALPHA_D


def kaplan_parameters(flops: float) -> float:
    """N of the least loss at `flops`, without the embedding (arXiv:2001.08361, table 6)."""
    return 1.3e9 * (flops / PF_DAY) ** 0.73


def chinchilla_parameters(flops: float) -> float:
    """G (C / 6)^a with a = beta / (alpha + beta), G = (alpha A / (beta B))^(1 / (alpha + beta))
    (arXiv:2203.15556, equation 4)."""
    both = ALPHA + BETA
    return (ALPHA * A / (BETA * B)) ** (1 / both) * (flops / 6) ** (BETA / both)


def optimal_models(flops: float, parameters: float = 0.0) -> dict[str, dict[str, float]]:
    """Parameters, tokens = flops / (6 parameters) and both losses, by law, and of a model with
    `parameters`."""
    sizes = {
        "kaplan": kaplan_parameters(flops),
        "chinchilla 1": (flops / 6 / TOKENS_PER_PARAMETER) ** 0.5,
        "chinchilla 3": chinchilla_parameters(flops),
    }
    sizes |= {"this model": parameters} if parameters else {}
    return {
        law: {
            "flops": flops,
            "parameters": n,
            "tokens": flops / 6 / n,
            "chinchilla": chinchilla_loss(n, flops / 6 / n),
            "kaplan": kaplan_loss(n, flops / 6 / n),
        }  # fmt: skip
        for law, n in sizes.items()
    }


def law_table(laws: dict[str, dict[str, float]]) -> str:
    """The rows of `optimal_models`."""
    budget = f"{next(iter(laws.values()))['flops']:.3g} FLOPs"
    losses = f"{'loss: Chinchilla':>18}{'Kaplan':>8}"
    lines = [f"{budget:<16}{'parameters, B':>14}{'tokens, T':>11}{losses}"]
    for law, got in laws.items():
        sizes = f"{got['parameters'] / 1e9:>14,.2f} {got['tokens'] / 1e12:>10,.3f}"
        lines.append(f"{law:<16}{sizes}{got['chinchilla']:>18.3f}{got['kaplan']:>8.3f}")
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# Report
# --------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `site`, which parses the numbers."""
    add_shared(parser, "model gpus device storage json")
    add = parser.add_argument
    add("--days", default="365", help="days that the energy is of")
    add("--watts", help="measured average per GPU with its server; default: the server's maximum")
    add("--pue", default=str(PUE), help="energy of the site / of its IT")
    add("--carbon", default=str(CARBON), help="kg of CO2e per kWh; default: the average of the US")
    add("--energy-price", default=str(ENERGY_PRICE), help="$ per kWh")
    add("--failure-rate", help="failures per 1000 days of 8 GPUs; default: Llama 3's, 3.79")
    add("--radix", default="64", help="ports of a switch, each of a NIC's rate")
    add("--pair", help="GPUs whose path to print, such as 0,9; default: the first and the last")
    add("--budget", help="FLOPs of a training run; default: --gpus for --days at 40%% MFU")
    add("--row", default="40", help="servers that a row's power is provisioned for")
    add("--prompt-share", default="0.05", help="of a server's time; an assumption")
    add("--risk", default="0.001", help="probability that a row's power is exceeded")
    parser.set_defaults(report=report)


def fraction(args: argparse.Namespace, name: str, low: float, high: float) -> float:
    """The number that a flag gives. ValueError unless low <= it <= high."""
    text = getattr(args, name)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    flag = f"--{name.replace('_', '-')}"
    require(low <= value <= high, f"{flag} {text!r} is not a number from {low:g} to {high:g}")
    return value


def parse_pair(text: str | None, gpus: int) -> tuple[int, int]:
    """ "0,9" as (0, 9); by default the first and the last GPU."""
    parts = (f"0,{gpus - 1}" if text is None else text).split(",")
    ok = len(parts) == 2 and all(part.strip().isdecimal() for part in parts)
    require(ok, f"--pair {text!r} is not two GPUs such as 0,9")
    return int(parts[0]), int(parts[1])


def energy_report(args: argparse.Namespace, gpus: int, device: Device) -> dict[str, float]:
    """MW and, over --days, MWh, tonnes of CO2e and $."""
    pue, days = fraction(args, "pue", 1, 5), fraction(args, "days", 0.01, 36500)
    watts = fraction(args, "watts", 1, 1e5) if args.watts is not None else device.watts
    mwh = energy_mwh(gpus, days * 24, watts * (1 + OTHER_IT), pue)
    tonnes = co2_tonnes(mwh, fraction(args, "carbon", 0, 5))
    cost = mwh * 1000 * fraction(args, "energy_price", 0, 100)
    return {**site_megawatts(gpus, watts, pue), "mwh": mwh, "tonnes": tonnes, "cost": cost}


def site(args: argparse.Namespace) -> dict[str, Any]:
    """All numbers of the report, by section."""
    shape, device, gpus = load_cluster(args.model, args.device, args.gpus)
    hours = GPU_HOURS_TO_FAILURE / gpus
    if args.failure_rate is not None:
        hours = mtbf_hours(gpus, fraction(args, "failure_rate", 1e-3, 1e6))
    budget = gpus * fraction(args, "days", 0.01, 36500) * 86400 * device.bf16 * TRAINING_MFU
    budget = budget if args.budget is None else fraction(args, "budget", 1e15, 1e35)
    storage = parse_number(args.storage, "--storage")
    row, share = parse_number(args.row, "--row"), fraction(args, "prompt_share", 0, 1)
    require(row <= 500, f"--row {row} is more than 500 servers")
    risk, radix = fraction(args, "risk", 0, 0.5), parse_number(args.radix, "--radix")
    plain, capped = (servers_per_row(row, share, risk, capped) for capped in (False, True))
    network = compare_networks(device, gpus, radix, parse_pair(args.pair, gpus))
    crashes = [crashes_per_month(gpus, radix, dual) for dual in (False, True)]
    return {
        "energy": energy_report(args, gpus, device),
        "components": component_mtbf_hours(hours),
        "failures": checkpointing(shape, gpus, hours * 3600, storage),
        "row": {"servers": plain, "capped": capped, "threshold": cap_threshold()},
        "network": network,
        "crashes_per_month": dict(zip(("single", "dual"), crashes)),
        "laws": optimal_models(budget, parameters(shape, active=True)),
    }  # fmt: skip


def report(args: argparse.Namespace) -> str:
    """The output of `site`."""
    found = site(args)
    if args.json:
        return json.dumps(found, indent=2)
    energy, failed, row = found["energy"], found["failures"], found["row"]
    parts = sorted(found["components"].items(), key=lambda part: part[1])
    least, note = "at most ", ": servers at their maximum power"
    least, note = (least, note) if args.watts is None else ("", "")
    crashes, gpus = found["crashes_per_month"], parse_number(args.gpus, "--gpus")
    pair = parse_pair(args.pair, gpus)
    return "\n".join((
        f"{args.gpus} {args.device}: servers {energy['servers']:.2f} MW, IT {energy['it']:.2f}, "
        f"the site {energy['site']:.2f}",
        f"{args.days} days: {least}{energy['mwh']:,.0f} MWh, {energy['tonnes']:,.0f} t of CO2e, "
        f"${energy['cost']:,.0f}{note}",
        f"mean time between failures {failed['mtbf_hours']:.2f} h; {args.model}: a checkpoint "
        f"best every {failed['checkpoint_interval'] / 60:.1f} min, goodput {failed['goodput']:.1%}",
        "hours between failures of a component: "
        + ", ".join(f"{part} {hours:,.0f}" for part, hours in parts[:6]),
        f"a row with power for {args.row} servers holds {row['servers']} in inference, "
        f"{row['capped']} with prompts capped above {row['threshold']:.0%} of it",
        "", network_table(found["network"], pair),
        f"NIC links and leaves crash a job on all GPUs {crashes['single']:.2f} times a month, "
        f"{crashes['dual']:.2g} with two leaves per NIC",
        "", law_table(found["laws"]),
    ))  # fmt: skip
