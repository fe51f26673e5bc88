"""A site and the runs on it: days, energy, CO2, megawatts, failures, checkpoints, servers per row.

    python -m planner site --gpus 16384 --device h100 --days 54
    run = estimate_run(shape, device, predict(...), seq, batch, tokens=15.6e12)
    run["days"], run["mwh"], run["mtbf_hours"], run["goodput"]

Energy is hours x GPUs x watts x PUE (Patterson et al., arXiv:2104.10350). With a device's own
watts, the most that a server takes, it is an upper bound; with a measured average (--watts) an
estimate. Failures are independent and follow each other at a constant rate, so the time between
them falls as 1 / GPUs (Kokolis et al., arXiv:2410.21680): right for the largest jobs; small jobs
fail several times as often as that says, for reasons other than hardware. A row of servers is
oversubscribed as in POLCA (Patel et al., ASPLOS 2024).

The report also has the network (network_topology.py), and the model and tokens that a budget is
best spent on (scaling_laws.py).
Needs: the standard library.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of the planner; run: python -m planner --help")

import argparse
import json
import math
from typing import Any

from planner import network_topology, scaling_laws
from planner.cost_model import (
    Device,
    Shape,
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
    network = network_topology.compare(device, gpus, radix, parse_pair(args.pair, gpus))
    crashes = [network_topology.crashes_per_month(gpus, radix, dual) for dual in (False, True)]
    return {
        "energy": energy_report(args, gpus, device),
        "components": component_mtbf_hours(hours),
        "failures": checkpointing(shape, gpus, hours * 3600, storage),
        "row": {"servers": plain, "capped": capped, "threshold": cap_threshold()},
        "network": network,
        "crashes_per_month": dict(zip(("single", "dual"), crashes)),
        "laws": scaling_laws.optimal_models(budget, parameters(shape, active=True)),
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
        "", network_topology.table(found["network"], pair),
        f"NIC links and leaves crash a job on all GPUs {crashes['single']:.2f} times a month, "
        f"{crashes['dual']:.2g} with two leaves per NIC",
        "", scaling_laws.table(found["laws"]),
    ))  # fmt: skip
