"""Scaling laws: the parameters N and tokens D that a budget of FLOPs is best spent on.

    optimal_models(5.76e23)["chinchilla 1"]     # {"parameters": 6.9e10, "tokens": 1.4e12, ...}

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
            "flops": flops, "parameters": n, "tokens": flops / 6 / n,
            "chinchilla": chinchilla_loss(n, flops / 6 / n),
            "kaplan": kaplan_loss(n, flops / 6 / n),
        }  # fmt: skip
        for law, n in sizes.items()
    }


def table(laws: dict[str, dict[str, float]]) -> str:
    """The rows of `optimal_models`."""
    budget = f"{next(iter(laws.values()))['flops']:.3g} FLOPs"
    losses = f"{'loss: Chinchilla':>18}{'Kaplan':>8}"
    lines = [f"{budget:<16}{'parameters, B':>14}{'tokens, T':>11}{losses}"]
    for law, got in laws.items():
        sizes = f"{got['parameters'] / 1e9:>14,.2f} {got['tokens'] / 1e12:>10,.3f}"
        lines.append(f"{law:<16}{sizes}{got['chinchilla']:>18.3f}{got['kaplan']:>8.3f}")
    return "\n".join(lines)
