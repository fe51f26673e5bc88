"""Alignment losses: DPO on preference pairs and GRPO on verifiable rewards.

After pretraining and supervised fine-tuning, a model is trained on which of two completions is
better, or on a reward of each completion. Both losses use the log-probabilities of a completion's
tokens (`token_logprobs`) under the model and under a frozen reference model, which keeps the policy
close to the initial one.

    DPO   Direct preference optimization (Rafailov et al., arXiv:2305.18290, eq. 7): binary
          classification of chosen against rejected completion, no reward model, no sampling:
          -log sigmoid(beta * ((log pi - log ref)(chosen) - (log pi - log ref)(rejected))).
    GRPO  Group relative policy optimization (DeepSeekMath, arXiv:2402.03300, eq. 3): sample several
          completions per prompt from the policy; the advantage of all tokens of a completion is its
          reward minus the mean reward of its group. PPO's clipped loss without a critic.
    RLVR  Rewards computed by a program (Tulu 3, arXiv:2411.15124, section 6): REWARDS.

Cost: DPO: two forward passes per completion (the reference's without gradient). GRPO: sampling,
which takes most of the time, and a third forward pass if kl is not 0. When it loses: DPO on pairs
that are unlikely under the policy (both log-probabilities fall); GRPO if all rewards of a group are
equal (no gradient) or if the policy can get the reward without solving the task (reward hacking).
Dividing by the group's standard deviation upweights prompts that are nearly always or never solved,
and 1 / |y| upweights short completions (Dr. GRPO, arXiv:2503.20783): normalize=False and a mask of
ones avoid both.

Hook: none; the functions take tensors: B completions, T tokens, V vocabulary, G groups of n
completions. Losses and statistics are sums, to be added over micro-batches and ranks; the caller
divides them by the token or pair count of the whole step. Equivalence (test_all.py): gradients
equal those of the formulas in fp64. `python training/alignment.py` runs a check and prints a table.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

Reward = Callable[[str, str, str], float]  # (prompt, completion, answer)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """log p(target) in nats: logits (..., V), targets (...) -> (...) in fp32 (fp64 for fp64
    logits), 0 where the target is -100."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nll = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), reduction="none")
    return -nll.view_as(targets)


def dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1
) -> tuple[Tensor, dict[str, Tensor]]:
    """DPO loss (arXiv:2305.18290, eq. 7) of pairs, from the sums of their token_logprobs, each
    (B,).

    beta: strength of the implicit KL penalty. Returns the loss and statistics, all summed over
    pairs: reward_margin = beta * (log-ratio of chosen - log-ratio of rejected), and accuracy, 1 if
    the margin is above 0."""
    _check(beta > 0, f"beta must be above 0, not {beta}")
    margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    loss = -F.logsigmoid(margin).sum()
    margin = margin.detach()
    return loss, {"reward_margin": margin.sum(), "accuracy": (margin > 0).to(margin.dtype).sum()}


def group_advantages(rewards: Tensor, normalize: bool = True) -> Tensor:
    """Group-relative advantages: rewards minus their group's mean, (G, n) -> (G, n). normalize:
    also divide by the group's (population) standard deviation (arXiv:2402.03300, 4.1.2); False is
    Dr. GRPO (arXiv:2503.20783, 3.2). Exactly 0 if all rewards of a group are equal."""
    _check(rewards.dim() == 2, f"rewards must be (groups, n), not {tuple(rewards.shape)}")
    centered = rewards - rewards.mean(1, keepdim=True)
    centered = centered.masked_fill((rewards == rewards[:, :1]).all(1, keepdim=True), 0.0)
    if not normalize:
        return centered
    return centered / (centered.square().mean(1, keepdim=True).sqrt() + 1e-6)


def grpo_loss(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor | None, advantages: Tensor,
    mask: Tensor, clip: float = 0.2, clip_high: float | None = None, kl: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """GRPO loss (arXiv:2402.03300, eq. 3) summed over tokens, from token_logprobs.

    logprobs (B, T) of the model; old_logprobs of the policy that sampled the tokens; ref_logprobs
    of the reference model, required if kl is not 0; advantages (B,) or (B, T). mask (B, T) weights
    tokens: 0 for tokens that were not sampled; else 1, for equal weight per token (DAPO,
    arXiv:2503.14476, 3.3), or 1 / |y|, for equal weight per completion as in eq. 3.

    With r = exp(logprobs - old_logprobs), a token's loss is -min(r A, clamp(r, 1 - clip, 1 +
    clip_high) A) + kl * k3, where k3 = exp(d) - d - 1, d = ref - logprobs, is an unbiased,
    non-negative estimate of KL(model || ref) (eq. 4). clip_high: default clip.

    Returns the loss and mask-weighted sums: kl (k3, 0 without a reference) and clipped (1 for
    tokens whose gradient is clipped)."""
    _check(kl == 0 or ref_logprobs is not None, f"kl {kl} requires ref_logprobs")
    _check(0 < clip < 1, f"clip must be between 0 and 1, not {clip}")
    high = clip if clip_high is None else clip_high
    _check(high > 0, f"clip_high must be above 0, not {high}")
    A = advantages[:, None] if advantages.dim() == 1 else advantages
    sampled, mask = mask != 0, mask.to(logprobs.dtype)
    zero_masked = lambda x: x.masked_fill(~sampled, 0.0)  # masked values may be inf or NaN
    ratio = zero_masked(logprobs - old_logprobs).exp()
    unclipped, clipped = ratio * A, ratio.clamp(1 - clip, 1 + high) * A
    loss, k3 = -torch.minimum(unclipped, clipped), torch.zeros_like(ratio)
    if ref_logprobs is not None:
        d = zero_masked(ref_logprobs - logprobs)
        k3 = d.exp() - d - 1
        loss = loss + kl * k3 if kl else loss
    is_clipped = (clipped < unclipped).to(mask.dtype)
    stats = {"kl": (k3 * mask).sum().detach(), "clipped": (is_clipped * mask).sum()}
    return (loss * mask).sum(), stats


# --------------------------------------------------------------------------------------------------
# Rewards
# --------------------------------------------------------------------------------------------------

NUMBER = re.compile(r"(?<!\d)-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<!\d)-?\.\d+")


def _last_number(text: str) -> Decimal | None:
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def exact_reward(prompt: str, completion: str, answer: str) -> float:
    """1 if the completion equals the answer, ignoring surrounding whitespace."""
    return float(completion.strip() == answer.strip())


def number_reward(prompt: str, completion: str, answer: str) -> float:
    """1 if the last number in the completion equals the last number in the answer, as in GSM8K
    (arXiv:2110.14168): "so 1,024.0" matches "#### 1024"."""
    wanted = _last_number(answer)
    _check(wanted is not None, f'reward "number": the answer {answer!r} contains no number')
    return float(_last_number(completion) == wanted)


def prefix_reward(prompt: str, completion: str, answer: str) -> float:
    """1 if the completion starts with the answer, ignoring leading whitespace."""
    return float(completion.lstrip().startswith(answer.strip()))


REWARDS = {"exact": exact_reward, "number": number_reward, "prefix": prefix_reward}


def load_reward(name: str) -> Reward:
    """A reward function reward(prompt, completion, answer) -> float: one of REWARDS, or FUNCTION
    of "FILE.py:FUNCTION"; the file is executed. ValueError if there is no such function."""
    if name in REWARDS:
        return REWARDS[name]
    path, colon, function = name.rpartition(":")
    ok = bool(colon) and path.endswith(".py") and Path(path).is_file()
    known = ", ".join(REWARDS)
    _check(ok, f"reward {name!r} must be {known} or FILE.py:FUNCTION of an existing file")
    # a name of its own: a file json.py must not replace the library's module
    spec = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and typing look for it there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:  # user code may raise anything
        raise ValueError(f"reward {name!r}: {path} failed: {type(e).__name__}: {e}") from e
    reward = getattr(module, function, None)
    _check(callable(reward), f"reward {name!r}: {path} has no function {function!r}")
    return reward


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def check() -> None:
    """grpo_loss and its gradient are those of eq. 3, written token by token in fp64."""
    torch.manual_seed(0)
    new, old, ref = (torch.randn(4, 5, dtype=torch.float64) * 0.3 for _ in range(3))
    A, mask = torch.randn(4, dtype=torch.float64), (torch.rand(4, 5) > 0.3).double()
    new.requires_grad_()
    loss, _ = grpo_loss(new, old, ref, A, mask, clip=0.2, clip_high=0.3, kl=0.1)
    want = 0
    for b, t in mask.nonzero().tolist():
        r, q = new[b, t].exp() / old[b, t].exp(), ref[b, t].exp() / new[b, t].exp()
        want -= torch.min(r * A[b], r.clamp(0.8, 1.3) * A[b]) - 0.1 * (q - q.log() - 1)
    grads = [torch.autograd.grad(x, new)[0] for x in (loss, want)]
    assert torch.allclose(loss, want, rtol=1e-12) and torch.allclose(*grads, rtol=1e-10)


def main() -> None:
    """Milliseconds of the losses, forward and backward."""
    from torch.utils.benchmark import Timer  # here: its import takes 0.12 s

    check()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    B, T, V = (16, 1024, 32000) if device == "cuda" else (8, 64, 16000)
    logits = torch.randn(B, T, V, device=device, dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(V, (B, T), device=device)
    x = token_logprobs(logits, targets).detach().requires_grad_()
    ref, ones, A = x.detach(), torch.ones_like(x), torch.randn(B, device=device)
    pairs = lambda x: (x[0::2].sum(-1), x[1::2].sum(-1))
    gather = lambda: logits.float().log_softmax(-1).gather(-1, targets[..., None])
    print(f"{device}, {B} completions of {T} tokens, vocabulary {V}: forward and backward, ms")
    for name, run in {
        "log_softmax, gather": gather,
        "token_logprobs": lambda: token_logprobs(logits, targets),
        "dpo_loss": lambda: dpo_loss(*pairs(x), *pairs(ref))[0],
        "grpo_loss, kl": lambda: grpo_loss(x, ref, ref, A, ones, kl=0.1)[0],
    }.items():
        timer = Timer("run().sum().backward()", globals={"run": run})
        print(f"{name:24}{1e3 * timer.blocked_autorange().median:9.2f}")


if __name__ == "__main__":
    main()
