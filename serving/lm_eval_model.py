"""A model class for EleutherAI's lm-eval: `sheaf` as its --model.

    python -m serving.lm_eval_model --model sheaf --tasks hellaswag,arc_easy \\
        --model_args checkpoint=DIR,quantize=int4

lm-eval finds models by a name that a class registers, so its own program runs here, with every flag
of its own. --model_args are generate.py's flags (checkpoint, quantize, dtype, adapter, ...) and
settings of --set, without dashes. Three methods are all it needs:

    loglikelihood           of continuations after contexts: multiple choice, LAMBADA
    loglikelihood_rolling   of whole texts: perplexity. Texts beyond the context are scored in
                            windows with as much context as fits, in lm-eval's own division
    generate_until          greedy or sampled text up to stop strings: GSM8K, HumanEval

All requests of a call are one continuous batch of paged_kv.py's Engine. A BOS token is added where
the tokenizer adds one, which lm-eval's own `hf` does only for some families. When it loses: lm-eval
loads its tasks from the Hugging Face hub (local ones by --include_path); `--model
local-completions` scores a running generate.py --serve instead, from anywhere.

Equivalence (test_all.py): accuracies of a local task == those of generate.py --choices; the
log-likelihood of a text == that of --perplexity; texts == greedy ones. Needs: lm_eval.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: python -m serving.lm_eval_model --help")

import sys
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from generation.config import GenerateConfig, parse_args
from generation.load import open_gguf
from paged_kv import SamplingParams
from serving.batch import Request
from serving.build import build_service
from serving.evaluate import encode_pairs, first_token, loglikelihoods, run_requests

LM_EVAL_DEVICE = "cuda:0"  # what lm-eval passes without --device, with a GPU or not
MAX_NEW_TOKENS = 256  # of generate_until, if the task does not say: lm-eval's default


def to_argv(settings: dict[str, Any]) -> list[str]:
    """--model_args as generate.py's command line. ValueError for an unknown name."""
    argv, known = ["--choices"], GenerateConfig.flags()
    for name, value in settings.items():
        if name not in known:
            raise ValueError(f"--model_args {name}: generate.py has no such flag or setting")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if known[name].metadata["rare"]:
            argv += ["--set", f"{name}={text}"]
        elif known[name].default is not False:
            argv += [f"--{name.replace('_', '-')}={text}"]
        elif text == "true":
            argv += [f"--{name.replace('_', '-')}"]
    return argv


@register_model("sheaf")
class SheafLM(LM):
    """checkpoint, quantize, ...: generate.py's flags. lm-eval's --batch_size is ignored: a batch
    is what the engine holds."""

    def __init__(
        self, batch_size: Any = None, max_batch_size: Any = None, device: str | None = None,
        **settings: Any,
    ):  # fmt: skip
        super().__init__()
        if device not in (None, LM_EVAL_DEVICE):
            settings["device"] = device
        args = parse_args(to_argv(settings))
        with open_gguf(args):
            self.service = build_service(args)
        self.tokenizer = self.service.tokenizer
        self.context = self.service.engine.model.config.context
        self.prefix = first_token(self.service)

    @torch.inference_mode()
    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Nats of each (context, continuation), and whether greedy decoding continues so."""
        pairs = encode_pairs(self.service, (request.args for request in requests))
        return loglikelihoods(self.service, pairs)

    @torch.inference_mode()
    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Nats of each (text,)."""
        limit, pairs, owners = self.context - 2, [], []
        for i, request in enumerate(requests):
            ids = self.tokenizer.encode(request.args[0], bos=False)
            for window in utils.get_rolling_token_windows(ids, self.prefix[0], limit, 1):
                pairs.append(utils.make_disjoint_window(window))
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, (nats, _) in zip(owners, loglikelihoods(self.service, pairs)):
            totals[i] += nats
        return totals

    @torch.inference_mode()
    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """The text after each (context, kwargs), up to one of kwargs["until"]."""
        made = [self._request(i, *request.args) for i, request in enumerate(requests)]
        run_requests(self.service, ((request,) for request in made))
        return [request.samples[0].text for request in made]

    def _request(self, i: int, context: str, kwargs: dict[str, Any]) -> Request:
        until, n = kwargs.get("until") or [], kwargs.get("max_gen_toks", MAX_NEW_TOKENS)
        options = {k: kwargs[k] for k in ("temperature", "top_k", "top_p", "min_p") if k in kwargs}
        if not kwargs.get("do_sample", "temperature" in options):
            options["temperature"] = 0.0
        if n >= self.context:
            text = f"the model's context is {self.context} tokens; set --gen_kwargs max_gen_toks=N"
            raise ValueError(f"max_gen_toks {n}: {text}")
        stop = tuple(filter(None, [until] if isinstance(until, str) else until))
        params = SamplingParams(max_new_tokens=n, stop=stop, **options)
        ids = self.tokenizer.encode(context) or self.prefix
        return Request(str(i), i, ids[n - self.context :], params)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except (ValueError, OSError) as e:  # a mistake in a flag, or a task that lm-eval does not find
        sys.exit(f"lm_eval_model.py: error: {e}")
