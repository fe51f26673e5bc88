"""One Service on several tensor-parallel ranks; its requests reach rank 0 alone.

Every rank has a shard of the weights and of the KV cache, and the whole rest of a Service:
scheduler, sampler, tokenizer. A step is a function of the requests, so all ranks run the same steps
if they queue and abort the same requests before each. Rank 0 records what it was asked since its
last step and broadcasts it before the next one, as SGLang's scheduler does; the others repeat it
and step too. The times and the free memory that decisions depend on are broadcast as well
(build.py: engine_options).

After a step that failed on one rank, or because another has died, the ranks may disagree. So rank 0
ends its process then, and whatever started the ranks (torchrun, cluster.py) ends the others.

Cost: one broadcast of an object list per step. When it loses: the other ranks compile a new regular
expression between two steps, where rank 0's AsyncEngine does it in a thread.

Equivalence (test_all.py): the tokens of 2 ranks == those of one process, whatever comes and goes.
Needs: serving/batch.py, and a process group that sends objects.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import os
import pickle
import traceback
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from generation.ranks import broadcast_object
from paged_kv import Output
from serving.batch import Request, Service


class Rank0Service:
    """What AsyncEngine uses of a Service, on rank 0."""

    def __init__(self, service: Service):
        self.service, self.engine = service, service.engine
        self.compile_grammar = service.compile_grammar
        self.calls: list[bytes] = []  # since the last step

    def add(self, request: Request, prompt_logprobs: int | None = None) -> Output:
        call = "add", _portable(request), prompt_logprobs
        return self._record(call, request, prompt_logprobs)

    def resume(self, request: Request, earlier: Output) -> Output:
        call = "resume", _portable(request), replace(earlier, id=None)
        return self._record(call, request, earlier)

    def abort(self, request: Request) -> None:
        """The ranks' engines have the same unfinished requests in the same order."""
        self._record(("abort", list(self.engine.outputs).index(request)), request)

    def _record(self, call: tuple, *args: Any) -> Any:
        """Call a method here; the other ranks will if it raises nothing. call: its name, and the
        arguments for them."""
        data = pickle.dumps(call)  # first: the method changes what the arguments refer to
        result = getattr(self.service, call[0])(*args)
        self.calls.append(data)
        return result

    def step(self) -> list[Output]:
        calls, self.calls = self.calls, []
        try:
            broadcast_object(calls)
            return self.service.step()
        except Exception:
            traceback.print_exc()
            os._exit(1)


def _portable(request: Request) -> Request:
    """A copy that can be pickled."""
    params = request.params
    if params.grammar is not None and not isinstance(params.grammar, str):
        params = replace(params, grammar=params.grammar.pattern)
    return replace(request, params=params, on_text=None, samples={})


def on_rank0(service: Service) -> Service | Rank0Service:
    """The Service itself if there is one rank."""
    return Rank0Service(service) if dist.is_initialized() else service


def follow(service: Service) -> None:
    """Another rank: repeat what rank 0 does, until it broadcasts None."""
    while (calls := broadcast_object(None)) is not None:
        for name, *args in map(pickle.loads, calls):
            if name == "abort":
                args = [list(service.engine.outputs)[args[0]]]
            getattr(service, name)(*args)
        service.step()
