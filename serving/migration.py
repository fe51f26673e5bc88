"""Live migration: a request that decodes moves to another engine, and pauses for a part of its KV.

Requests differ in length, so engines of equal load drift apart: one preempts while another has free
blocks. A request can move, but stop and copy keeps it waiting for all of its KV. Llumnix
(arXiv:2406.03243) copies the KV while the request decodes on, since what is written never changes:

    part, part, ... until none is left        one between two steps; the request decodes on
    ask whether the target has room           no: it stays
    the last part, and the request            the pause: the tokens since the question
    the target confirms, or it returns        no request is lost if the target dies or refuses

If the channel ends between the target's acceptance and its answer, both sides run the request:
losing it would be worse, and which side's output counts is the caller's to say.

    migration = Migration(KVSender(engine), id, key, channel)
    while migration.result is None:
        engine.step()
        migration.step()                      # and migration.take(answer) of what arrives

Cost: the KV crosses the network once, and each step waits for the copy of its part to host memory.
When it loses: short sequences, which are recomputed as fast as they are copied. Not here: when to
move which request. Between the question and the hand-over other requests may take the room; then
the request waits there.

Equivalence (test_all.py): tokens == those of one engine, whatever moves back and forth, is
preempted, aborted or refused; nothing is run again. Needs: kv_transfer.py.

    torchrun --nproc-per-node 2 -m serving.migration --tokens 2000

prints the pause of a request whose KV is copied at once or in parts: rank 0 runs prompts of random
tokens on a random model, rank 1 goes on. It is the time from the last token of rank 0 to the first
of rank 1, less that of a decode step: the median of several requests.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: torchrun --nproc-per-node 2 -m serving.migration --help")

import argparse
import os
import queue
import statistics
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from model import CONFIGS, Transformer
from paged_kv import Engine, Output, SamplingParams, Sequence
from serving.kv_transfer import (
    Cancel, Channel, Handover, KVInbox, KVPart, KVSender, KVTransfer, decodes, import_request,
)  # fmt: skip
from training.flags import check_positive


class Ask(NamedTuple):
    """Whether a request could continue at once."""

    key: int
    tokens: list[int]
    n_prompt: int
    params: SamplingParams


class Answer(NamedTuple):
    """To Ask or Handover: whether the target takes the request."""

    key: int
    accepted: bool


class Migration:
    """A request moves to another engine while it decodes: call step() after each step of this one.

    Its KV is copied in parts of at most `part` tokens, one for each step. Then the target is asked
    whether it has room; if it has, the request pauses for the last part, which has the tokens of
    this time. Until the target has confirmed it, it can return here: no request is lost."""

    def __init__(self, sender: KVSender, id: Any, key: int, channel: Channel, part: int = 256):
        self.sender, self.id, self.key, self.channel, self.part = sender, id, key, channel, part
        self.output = sender.engine.outputs[id]
        self.asked = self.answered = False
        self.moved: KVTransfer | None = None  # out of this engine
        self.result: bool | None = None  # True: it continues there; False: here

    def step(self) -> None:
        """Copy, ask, or hand over."""
        engine = self.sender.engine
        if self.result is not None or self.moved is not None:
            return
        if engine.outputs.get(self.id) is not self.output:  # it has ended
            return self.fail()
        try:
            left = self.sender.send_new(self.id, self.key, self.channel, self.part)
            seq = engine.sequences[self.id][0]
            if left == 0 and not self.asked:
                self.asked = True
                self.channel.send(Ask(self.key, seq.tokens, seq.n_prompt, seq.params))
            elif left == 0 and self.answered and decodes(engine, self.id):
                self.moved = self.sender.hand_over(self.id, self.key, self.channel)
        except RuntimeError:  # the channel failed
            self.fail()

    def take(self, answer: Answer) -> None:
        """What the target says: to Ask, then to Handover."""
        if not answer.accepted:
            self.fail()
        elif self.moved is not None:
            self.result = True
        else:
            self.answered = True

    def fail(self) -> None:
        """The request has ended, or the target refused it or died (its channel ended with an
        exception): it stays here, or returns."""
        self.sender.sent.pop(self.id, None)
        self.result = False
        if self.moved is not None:
            return import_request(self.sender.engine, self.moved)
        with suppress(RuntimeError):
            self.channel.send(Cancel(self.key))


def accept_migration(inbox: KVInbox, message: Any, channel: Channel) -> Output | None:
    """What a target does with a message of Migration. Returns a request that continues here."""
    engine = inbox.engine
    if isinstance(message, KVPart):
        inbox.add(message)
    elif isinstance(message, Cancel):
        inbox.forget(message.key)
    elif isinstance(message, Ask):
        channel.send(Answer(message.key, has_room(engine, message)))
    elif isinstance(message, Handover):
        try:
            output = inbox.receive(message)
        except ValueError:  # its id is in use, for example
            return channel.send(Answer(message.key, False))
        channel.send(Answer(message.key, True))
        return output
    return None


def has_room(engine: Engine, ask: Ask) -> bool:
    """Whether a request is valid and would be admitted in the next step."""
    seq = Sequence(ask.tokens, ask.n_prompt, ask.params, n_unforked=ask.params.n)
    try:
        engine._check_request(seq.tokens[: seq.n_prompt], seq.params)
        seq.adapter = engine._adapter(seq.params)
    except ValueError:
        return False
    return not engine.scheduler.waiting and engine.scheduler._fits(seq)


# --------------------------------------------------------------------------------------------------
# Pauses
# --------------------------------------------------------------------------------------------------

MODES = {  # the rows of the table
    "hand-over after prefill, at once": (False, False),
    "hand-over after prefill, in parts": (False, True),
    "migration, stop and copy": (True, False),
    "migration, live": (True, True),
}
DECODED = 20  # tokens before a migration


def build(args: argparse.Namespace) -> Engine:
    """An engine with a random model: 64 KB of KV per token in bf16, and little compute."""
    torch.manual_seed(0)
    shape = dict(n_layers=8, n_heads=16, n_kv_heads=16, head_dim=128, max_seq_len=2 * args.tokens)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = Transformer(replace(CONFIGS["small"], **shape)).to(torch.bfloat16)
    options = dict(num_blocks=args.tokens // 8, max_num_batched_tokens=args.part)
    return Engine(model, max_num_seqs=8, static=False, **options)


def source(engine: Engine, args: argparse.Namespace, channel: Channel, answers: Any) -> list[float]:
    """Rank 0: for each mode and request, the time of its last token and the time of a step."""
    times, sender = [], KVSender(engine)
    params, vocab = SamplingParams(temperature=0, max_new_tokens=99), engine.model.config.vocab_size
    for number in range(len(MODES) * args.repeat):
        migrates, in_parts = list(MODES.values())[number % len(MODES)]
        prompt = torch.randint(3, vocab, (args.tokens,)).tolist()
        engine.add(prompt, replace(params, ignore_eos=True), id=number)
        output, migration = engine.outputs[number], None
        while number in engine.outputs:
            engine.step()
            now = time.perf_counter()
            done = decodes(engine, number) and len(output.token_ids) > DECODED * migrates
            if migrates and in_parts and done:
                options = sender, number, number, channel, args.part
                migration = migration or Migration(*options)
                while not answers.empty():
                    migration.take(answers.get())
                migration.step()
            elif done:
                sender.hand_over(number, number, channel)
            elif in_parts and not migrates:
                sender.send_new(number, number, channel)
        times.append(now)
        answers.get()  # to the hand-over
    channel.send(None)
    channel.flush()
    return times


def target(engine: Engine, channel: Channel, messages: Any) -> list[tuple[float, float]]:
    """Rank 1: for each request, the time of its first token here, and the seconds of a step."""
    times, inbox = [], KVInbox(engine)
    while (message := messages.get()) is not None:
        if isinstance(message, Exception):
            raise message
        output = accept_migration(inbox, message, channel)
        if not isinstance(message, Handover):
            continue
        engine.step()
        first = time.perf_counter()
        for _ in range(8):
            engine.step()
        steps = [b - a for a, b in zip(output.timestamps[-8:], output.timestamps[-7:])]
        times.append((first, statistics.median(steps)))
        engine.abort(output.id)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="-m serving.migration", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--tokens", type=int, default=2000, help="of a prompt")
    parser.add_argument("--part", type=int, default=256, help="tokens of a part and of a step")
    parser.add_argument("--repeat", type=int, default=5, help="requests of each kind")
    args = parser.parse_args()
    try:
        check_positive(args, "tokens", "part", "repeat")
        if os.environ.get("WORLD_SIZE") != "2":
            raise ValueError("run: torchrun --nproc-per-node 2 -m serving.migration")
    except ValueError as e:
        parser.exit(1, f"error: {e}\n")
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.device_count() > 1 else "gloo")
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    rank, messages = dist.get_rank(), queue.Queue()
    engine = build(args)
    channel = Channel(engine, {1 - rank: slice(None)}, [1 - rank])
    channel.listen(messages.put)
    both: list[Any] = [None, None]
    times = target(engine, channel, messages) if rank else source(engine, args, channel, messages)
    dist.all_gather_object(both, times)
    if rank == 0:
        size = engine.cache.bytes_per_token * args.tokens / 1e6
        print(f"{args.tokens} tokens, {size:.0f} MB of KV, parts of {args.part} tokens   pause, ms")
        pauses = [1e3 * (b - a - step) for a, (b, step) in zip(*both)]
        for i, name in enumerate(MODES):
            print(f"{name:40} {statistics.median(pauses[i :: len(MODES)]):8.1f}")
        print(f"{'(a decode step)':40} {1e3 * statistics.median(step for _, step in both[1]):8.1f}")
    os._exit(0)  # the other rank's thread may still wait for messages


if __name__ == "__main__":
    main()
