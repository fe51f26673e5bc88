"""Token streams over a network that loses packets: every packet repeats what is not acknowledged.

A transport that delivers in order, such as TCP, holds back every packet behind a lost one until its
retransmission arrives, a round trip or a timeout later: a reader sees a stall and then a burst. The
tokens of an answer are a few bytes each, so there is room for all of them: with Eloquent (Li et al.
2024, "Eloquent: A More Robust Transmission Scheme for LLM Token Streaming") a packet carries the
new tokens and all that are not acknowledged yet, and any packet that arrives can be shown without
the ones before it.

`UnackedTail` is the sender's state, `Reader` the receiver's; serving/server.py uses the first with
`?repeat_unacked=1`, for proxies that forward its events in datagrams. `simulate` compares both
transports on one channel. Costs: a packet grows by a round trip's tokens, acknowledgements. When it
loses: over TCP itself, or without loss, where it only sends more bytes.

`python serving/unacked.py` prints stalls by rate of loss. Used by no hook. Needs: nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class UnackedTail:
    """The sender's side of a text that grows."""

    acked: int = 0  # characters that the reader has

    def packet(self, text: str) -> tuple[int, str]:
        """(offset, characters from there on) of the text so far."""
        return self.acked, text[self.acked :]

    def ack(self, n: int) -> None:
        """The reader has n characters. Acknowledgements may arrive late and out of order."""
        self.acked = max(self.acked, n)


@dataclass
class Reader:
    """The receiver's side. text is what has arrived, without gaps."""

    text: str = ""

    def receive(self, offset: int, part: str) -> str:
        """Take a packet, whichever were lost or overtaken; returns what is new."""
        assert offset <= len(self.text), "the sender skipped characters that were not acknowledged"
        new = part[len(self.text) - offset :]
        self.text += new
        return new


def simulate(
    repeat_unacked: bool, loss: float, n: int = 200, interval: float = 0.03, delay: float = 0.05,
    timeout: float = 0.2, seed: int = 0,
) -> list[float]:  # fmt: skip
    """When each of n tokens is shown, seconds. The sender has one every `interval`; packets and
    acknowledgements take `delay` and are lost with probability `loss`. What is not acknowledged
    `timeout` after it was sent is sent again: one packet, or with repeat_unacked the tail."""
    rng = random.Random(seed)
    lost = lambda: rng.random() < loss
    made = [i * interval for i in range(n)]
    if not repeat_unacked:  # in order: a token waits for all before it
        shown, last = [], 0.0
        for time in made:
            while lost():
                time += timeout
            last = max(last, time + delay)
            shown.append(last)
        return shown
    tail, reader, shown = UnackedTail(), Reader(), []
    arrivals: list[tuple[float, int, str]] = []  # time, offset, characters
    acks: list[tuple[float, int]] = []
    text, time, last_sent = "", 0.0, 0.0
    while tail.acked < n:
        due = made[len(text)] if len(text) < n else last_sent + timeout
        events = [(due, "send"), *((t, "packet") for t, *_ in arrivals[:1])]
        time, kind = min(events + [(t, "ack") for t, _ in acks[:1]])
        if kind == "send":
            text += "x" if len(text) < n else ""
            last_sent = time
            if not lost():
                arrivals.append((time + delay, *tail.packet(text)))
        elif kind == "packet":
            _, offset, part = arrivals.pop(0)
            shown += [time] * len(reader.receive(offset, part))
            if not lost():
                acks.append((time + delay, len(reader.text)))
        else:
            tail.ack(acks.pop(0)[1])
    return shown


def stalled(shown: Sequence[float], interval: float = 0.03, limit: float = 0.1) -> float:
    """Seconds per token that a reader waits beyond `limit` between two tokens."""
    waits = (b - a for a, b in zip(shown, shown[1:]))
    return sum(max(0.0, wait - limit) for wait in waits) / len(shown)


def main() -> None:
    print(f"{'loss':>5} {'in order, ms':>13} {'repeated, ms':>13}   stalled per token")
    for loss in (0.0, 0.05, 0.1, 0.3):
        both = []
        for repeat in (False, True):
            runs = [stalled(simulate(repeat, loss, seed=seed)) for seed in range(50)]
            both.append(1e3 * sum(runs) / len(runs))
        print(f"{loss:5.0%} {both[0]:13.2f} {both[1]:13.2f}")
    assert both[1] < both[0] / 2


if __name__ == "__main__":
    main()
