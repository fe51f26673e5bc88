"""What a training run costs: days, energy, failures, checkpoints.

    run = estimate_run(shape, device, predict(...), seq, batch, tokens=15.6e12)
    run["days"], run["mwh"], run["mtbf_hours"], run["goodput"]

Needs: the standard library.
"""

from __future__ import annotations

import math

from parallelism.cost_model import Device, Shape, model_flops, parameters
from parallelism.training_plan import Prediction

GPU_HOURS_TO_FAILURE = 54 * 24 * 16384 / 419  # unexpected ones (Llama 3, arXiv:2407.21783, 3.3.4)
STORAGE_BANDWIDTH = 2e12 / 16384  # bytes/s per GPU: Llama 3's, 2 TB/s sustained (3.3.1)
RESTART_SECONDS = 600.0  # to detect a failure, reschedule and load
PUE = 1.1  # site energy / server energy


# --------------------------------------------------------------------------------------------------
# A whole run
# --------------------------------------------------------------------------------------------------


def checkpoint_interval(cost: float, mtbf: float) -> float:
    """Optimal seconds between checkpoints: sqrt(2 C M) (Young, CACM 1974; Daly, FGCS 2006, whose
    higher-order terms vanish for C << M)."""
    return math.sqrt(2 * cost * mtbf)


def goodput(cost: float, mtbf: float, interval: float, restart: float = RESTART_SECONDS) -> float:
    """Fraction of time spent training: without the checkpoints' cost and, per failure, half an
    interval of lost work and the restart."""
    return max(0.0, 1 - cost / interval - (interval / 2 + restart) / mtbf)


def estimate_run(
    shape: Shape, device: Device, got: Prediction, seq: int, batch: int, tokens: float,
    storage: float = STORAGE_BANDWIDTH,
) -> dict[str, float]:  # fmt: skip
    """A run of `tokens`: FLOPs (6 N D and attention; Kaplan, arXiv:2001.08361, 2.1), days with
    failures, MWh of the site, hours between failures, bytes of a checkpoint (fp32 weights and two
    moments), seconds to write one at `storage` bytes/s per GPU, and from one to the next."""
    gpus = got.plan.gpus
    mtbf, size = GPU_HOURS_TO_FAILURE * 3600 / gpus, 12.0 * parameters(shape)
    cost = size / (storage * gpus)
    interval = checkpoint_interval(cost, mtbf)
    useful = goodput(cost, mtbf, interval)
    days = tokens / (batch * seq) * got.step / 86400 / useful if useful else math.inf
    return {
        "tokens": tokens,
        "flops": model_flops(shape, seq) * tokens,
        "days": days,
        "mwh": days * 24 * gpus * device.watts * PUE / 1e6,
        "mtbf_hours": mtbf / 3600,
        "checkpoint_bytes": size,
        "checkpoint_seconds": cost,
        "checkpoint_interval": interval,
        "goodput": useful,
    }
