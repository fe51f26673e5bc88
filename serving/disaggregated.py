"""Disaggregated prefill and decode: one worker runs prompts, another decodes.

A prompt's chunk and the decoding sequences of one engine share each step, so a prompt delays every
next token. Two engines, each on its own ranks, do not disturb each other, and each can have its own
batch size and parallelism (DistServe, arXiv:2401.09670; Splitwise, arXiv:2311.18677).
`prefill_worker` runs each prompt to its first token, exports the request with its KV in host memory
(Engine.export_request, the format of KV swap, so block sizes may differ) and sends it;
`decode_worker` imports it and goes on:

    torch.distributed.init_process_group("gloo")
    engine = Engine(model, num_blocks=1024)
    if dist.get_rank() == 0:
        prefill_worker(engine, [(prompt_ids, params), ...], to=1)
    else:
        outputs = decode_worker(engine, source=0)

Cost: the KV of each prompt crosses the network once, pickled by send_object_list. When it loses:
short prompts, where the transfer takes longer than the prefill; few requests, which leave one of
the two engines idle. No program has a flag for it: the functions are called as above.

Equivalence (test_all.py): outputs == those of one engine, sampled ones and errors included.
Needs: paged_kv.py, and a process group of gloo or another that sends objects.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a library; run: torchrun a program that calls prefill_worker")

import queue
import threading
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from paged_kv import Engine, KVTransfer, Output, SamplingParams


def prefill_worker(
    engine: Engine, requests: Iterable[tuple[list[int], SamplingParams]], to: int
) -> None:
    """Run each prompt to its first token and send it, with its KV, to rank `to`. Prefill here does
    not delay decoding there."""
    send = lambda transfer: dist.send_object_list([transfer], to)
    for id, (prompt, params) in enumerate(requests):
        try:
            engine.add(prompt, params, id=id)
        except ValueError as e:
            send(KVTransfer(Output(id, prompt, error=str(e)), []))
    while engine.unfinished:
        for output in engine.step():
            send(KVTransfer(output, []) if output.finished else engine.export_request(output.id))
    send(None)


def decode_worker(engine: Engine, source: int) -> list[Output]:
    """Decode the requests that rank `source` sends; returns the outputs in their order."""
    inbox: queue.Queue[KVTransfer | BaseException | None] = queue.Queue(maxsize=64)

    def receive() -> None:
        box: list[Any] = [...]
        while box[0] is not None:
            try:
                dist.recv_object_list(box, source)
            except BaseException as e:  # the other worker died
                return inbox.put(e)
            inbox.put(box[0])

    threading.Thread(target=receive, daemon=True).start()
    outputs, more = {}, True
    while more or engine.unfinished:
        while more and (not engine.unfinished or not inbox.empty()):
            transfer = inbox.get()  # blocks only if there is nothing to decode
            if isinstance(transfer, BaseException):
                raise transfer
            more = transfer is not None
            if more:
                outputs[transfer.output.id] = transfer.output
            if more and transfer.sequences:
                engine.import_request(transfer)
        engine.step()
    return [outputs[id] for id in sorted(outputs)]
