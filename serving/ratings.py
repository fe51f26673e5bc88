"""Ratings of models from votes between pairs of them: Bradley-Terry and Elo.

    python serving/ratings.py votes.jsonl

A line is a vote: {"chosen_model": "a", "rejected_model": "b"}, as the page of generate.py --serve
exports them, or {"model_a": "a", "model_b": "b", "winner": "model_a"}, as LMSYS publishes them,
with the winners model_a, model_b, "tie" and "tie (bothbad)".

A rating difference of 400 is a chance of 10 to 1:  P(i beats j) = 1 / (1 + 10^((R_j - R_i) / 400)).

    Bradley-Terry  the ratings that make the votes likeliest (1952; Chatbot Arena, arXiv:2403.04132,
                   section 4), of all votes at once and so in any order. A tie is half a win for
                   each. Fitted by Newton's method; the standard errors are those of the inverse
                   Fisher information. Ratings have mean 1000.
    Elo            R += K (result - expected) after each vote, from 1000: a running estimate that
                   depends on the order of the votes, with the small K = 4 of Chatbot Arena.

When it loses: the Bradley-Terry ratings are infinite if some models never lose to the others (Ford,
1957): ValueError names them; give more votes. Both assume one strength per model: preferences that
go round in a circle, or differ by topic, have no ratings.

Equivalence (test_all.py): at the fit each model's expected wins are its wins; Elo's sum stays; the
ratings of votes drawn from known strengths are theirs within their standard errors.
Needs: torch. Without a file it checks itself and prints a small table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

SCALE, MEAN, K = 400.0, 1000.0, 4.0
RATE = torch.tensor(10.0, dtype=torch.float64).log() / SCALE  # of natural log-odds per point


class Vote(NamedTuple):
    """One comparison: 1 if a wins, 0 if b does, 0.5 for a tie."""

    a: str
    b: str
    result: float


def read_votes(path: Path) -> list[Vote]:
    """ValueError names file, line and field."""
    votes = []
    for n, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):  # invalid JSON or Unicode; too deeply nested
            found = None
        where = f"{path}: line {n}"
        if not isinstance(found, dict):
            raise ValueError(f"{where} is not a JSON object")
        names = ("chosen_model", "rejected_model")
        names = names if names[0] in found else ("model_a", "model_b")
        a, b = map(found.get, names)
        if not (isinstance(a, str) and isinstance(b, str) and a != b):
            raise ValueError(f'{where}: "{names[0]}" and "{names[1]}" must be two different names')
        winner = found.get("winner") if names[0] == "model_a" else names[0]
        results = {names[0]: 1.0, names[1]: 0.0, "tie": 0.5, "tie (bothbad)": 0.5}
        if not (isinstance(winner, str) and winner in results):
            raise ValueError(f'{where}: "winner" must be "model_a", "model_b" or "tie"')
        votes.append(Vote(a, b, results[winner]))
    if not votes:
        raise ValueError(f"{path}: holds no votes")
    return votes


def count_wins(votes: Sequence[Vote]) -> tuple[list[str], Tensor]:
    """The models, sorted, and wins (M, M): [i, j] is how often i beat j; a tie is half a win."""
    models = sorted({name for vote in votes for name in vote[:2]})
    index, wins = {name: i for i, name in enumerate(models)}, torch.zeros(len(models), len(models))
    wins = wins.double()
    for a, b, result in votes:
        wins[index[a], index[b]] += result
        wins[index[b], index[a]] += 1 - result
    return models, wins


def check_finite(models: Sequence[str], wins: Tensor) -> None:
    """ValueError unless every model has beaten every other one, directly or through others."""
    beats = wins > 0
    for _ in range(len(models).bit_length()):  # each time, of chains twice as long
        beats = beats | ((beats.double() @ beats.double()) > 0)
    for i, row in enumerate(beats):
        if not (row | (torch.arange(len(models)) == i)).all():
            never = [m for m, beaten in zip(models, row) if not beaten and m != models[i]]
            raise ValueError(
                f"{models[i]} never beats {', '.join(never)}, directly or through others: their "
                "Bradley-Terry ratings are infinitely far apart; give more votes"
            )


def bradley_terry(wins: Tensor) -> tuple[Tensor, Tensor]:
    """wins (M, M) -> ratings (M,) with mean 1000 and their standard errors (M,), in float64."""
    games, ratings = wins + wins.T, torch.zeros(len(wins), dtype=torch.float64)
    for _ in range(1000):  # strengths in natural log-odds, mean 0
        p = (ratings[:, None] - ratings).sigmoid()
        gradient = wins.sum(1) - (games * p).sum(1)
        weights = games * p * (1 - p)
        information = weights.sum(1).diag() - weights  # singular: the mean is free
        trace = information.trace()  # its pseudoinverse: the mean fixed, then free again
        inverse = (information + trace / len(wins) ** 2).inverse() - 1 / trace
        step = inverse @ gradient
        ratings = ratings + step * (2 / step.abs().max().clamp(min=1e-12)).clamp(max=1)
        if gradient.abs().max() < 1e-9 * games.sum():
            break
    return MEAN + ratings / RATE, inverse.diag().sqrt() / RATE


def elo(votes: Sequence[Vote], k: float = K) -> dict[str, float]:
    """Ratings after the votes in their order."""
    ratings: dict[str, float] = {}
    for a, b, result in votes:
        ra, rb = ratings.get(a, MEAN), ratings.get(b, MEAN)
        change = k * (result - 1 / (1 + 10 ** ((rb - ra) / SCALE)))
        ratings[a], ratings[b] = ra + change, rb - change
    return ratings


def table(votes: Sequence[Vote]) -> str:
    """A line per model, best first. ValueError if Bradley-Terry ratings are infinite."""
    models, wins = count_wins(votes)
    check_finite(models, wins)
    ratings, errors = bradley_terry(wins)
    online, games = elo(votes), (wins + wins.T).sum(1)
    lines = [f"{'model':<24}{'Bradley-Terry':>14}{'+/-':>7}{'Elo':>8}{'votes':>7}{'won':>7}"]
    for i in ratings.argsort(descending=True).tolist():
        share = wins[i].sum() / games[i]
        line = f"{models[i]:<24}{ratings[i]:14.0f}{errors[i]:7.0f}{online[models[i]]:8.0f}"
        lines.append(f"{line}{games[i]:7.0f}{share:7.1%}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """Rate the models of a file, or of votes drawn from known strengths."""
    if argv:
        try:
            return print(table(read_votes(Path(argv[0]))))
        except (ValueError, OSError) as e:
            sys.exit(f"ratings.py: error: {e}")
    rng, truth = torch.Generator().manual_seed(0), {"a": 1100.0, "b": 1000.0, "c": 900.0}
    pairs = [(a, b) for a in truth for b in truth if a < b] * 400
    chance = [1 / (1 + 10 ** ((truth[b] - truth[a]) / SCALE)) for a, b in pairs]
    won = torch.bernoulli(torch.tensor(chance), generator=rng).tolist()
    votes = [Vote(*pair, result) for pair, result in zip(pairs, won)]
    ratings, errors = bradley_terry(count_wins(votes)[1])
    assert ((ratings - torch.tensor([*truth.values()])).abs() < 4 * errors).all()
    print(table(votes))


if __name__ == "__main__":
    main(sys.argv[1:])
