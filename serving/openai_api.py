"""The OpenAI API's completions and chat completions: request bodies, response objects and chunks.

`parse_completion` and `parse_chat` turn a JSON body into a Call: the Engine's requests and how the
answer is to look. Every field, at every depth, is read or refused with a 400 that names it, as is
every value that this engine cannot honour. A field that is null counts as absent (but in a JSON
schema), and so does one that is not supported with a value that asks for nothing (ASKS_NOTHING).
Fields that the OpenAI API lacks and vLLM has (top_k, min_p, repetition_penalty, min_tokens,
ignore_eos) have vLLM's names. Defaults are the API's, not generate.py's: temperature 1, a random
seed, 16 tokens for a completion.

Only Python dictionaries come in and go out: serving/server.py speaks HTTP. Reference: OpenAI API
reference, completions and chat; the `openai` package parses every response in test_all.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import re
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from generation.json_schema import from_response_format
from huggingface.chat_template import ChatTemplate
from huggingface.fine_tune import template_of
from huggingface.tokenizer import TextStream, Tokenizer, printable
from paged_kv import SamplingParams
from serving.async_engine import LogProb, Piece, Progress, Stream
from serving.batch import Request, parse_logit_bias

FINISH = {"eos": "stop", "stop": "stop", "length": "length"}
MAX_LOGPROBS, MAX_STOP, MAX_PROMPTS, MAX_N = 20, 16, 128, 128
MAX_USER = 256  # characters: it is logged, and names a client of --policy
MAX_MESSAGE = 500  # characters of an error, which may quote the body

SAMPLING = {  # field of a body -> of SamplingParams
    "temperature": "temperature", "top_p": "top_p", "seed": "seed", "n": "n", "stop": "stop",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "min_tokens": "min_new_tokens",
    "ignore_eos": "ignore_eos",
}  # fmt: skip
COMMON = {*SAMPLING, "model", "stream", "stream_options", "user", "response_format", "max_tokens"}
COMPLETION = COMMON | {"prompt", "echo", "logprobs", "best_of"}
CHAT = COMMON | {"messages", "max_completion_tokens", "logprobs", "top_logprobs"}
ASKS_NOTHING = {  # fields that are not supported -> values with which they have no effect
    "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"), "parallel_tool_calls": (True, False),
    "modalities": (["text"],), "store": (False,), "suffix": ("",), "stop_token_ids": ([],),
    "include_obfuscation": (False,), "continuous_usage_stats": (False,), "metadata": ({},),
    "service_tier": ("auto", "default"), "add_generation_prompt": (True,),
}  # fmt: skip
RESPONSE_FORMATS = {"text": (), "json_object": (), "json_schema": ("json_schema",)}  # their fields
JSON_SCHEMA = {"name": str, "description": str, "strict": bool}  # have no effect: always strict
MAX_STOP_CHARS = 1000  # of a stop string


class APIError(Exception):
    """An error response: HTTP status, message, and the field of the body that is wrong. Message and
    field may quote a client: they are one printable line, for the log too."""

    def __init__(self, status: int, message: str, param: str | None = None, **headers: str):
        super().__init__(printable(message[:MAX_MESSAGE]))
        self.status, self.param = status, param and printable(param[:MAX_MESSAGE])
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        other = "invalid_request_error" if self.status < 500 else "server_error"
        kind = kinds.get(self.status, other)
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.status}
        return {"error": error}


@dataclass
class Model:
    """What a body is parsed against."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    context: int  # tokens of prompt and output at most
    vocab_size: int
    max_bytes: int = 2**20  # of a text: more cannot fit the context, and is not tokenized
    # LoRA adapters or --models by name, each a model of the API, with its text_format
    adapters: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Call:
    """A parsed body."""

    requests: list[Request]
    chat: bool
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    top_logprobs: int | None = None
    max_tokens_field: str = "max_tokens"  # that the body has, for errors
    no_output: bool = False  # max_tokens 0: the prompt's log-probabilities alone
    user: str = ""
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self):
        self.id = self.id or f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"

    @property
    def prompt_logprobs(self) -> int | None:
        return self.top_logprobs if self.echo else None


# --------------------------------------------------------------------------------------------------
# Bodies
# --------------------------------------------------------------------------------------------------


def parse_completion(body: Mapping[str, Any], model: Model) -> Call:
    """A body of POST /v1/completions. APIError names the field."""
    body = known_fields(body, COMPLETION, model)
    prompts = _prompts(body.get("prompt"), model)
    echo, top = _typed(body, "echo", bool, False), _integer(body, "logprobs", MAX_LOGPROBS)
    tokens = body.get("max_tokens", 16)
    no_output = echo and type(tokens) is int and tokens == 0
    params = _sampling_params(body, model, 1 if no_output else tokens, top)
    if (best_of := body.get("best_of", params.n)) != params.n or type(best_of) is not int:
        raise APIError(400, f"best_of must equal n ({params.n}), not {best_of!r}", "best_of")
    requests = [Request("", 0, ids, params) for ids in prompts]
    options = dict(echo=echo, top_logprobs=top, no_output=no_output) | _stream_fields(body)
    return Call(requests, chat=False, **options)


def parse_chat(body: Mapping[str, Any], model: Model) -> Call:
    """A body of POST /v1/chat/completions. APIError names the field."""
    body = known_fields(body, CHAT, model)
    template = template_of(body.get("model"), model.adapters, model.template)
    ids = _chat_prompt(body.get("messages"), model, template)
    logprobs = _typed(body, "logprobs", bool, False)
    top = _integer(body, "top_logprobs", MAX_LOGPROBS)
    if top is not None and not logprobs:
        raise APIError(400, "top_logprobs requires logprobs: true", "top_logprobs")
    top = (top or 0) if logprobs else None
    if {"max_tokens", "max_completion_tokens"} <= body.keys():
        raise APIError(400, "give max_completion_tokens or max_tokens, not both", "max_tokens")
    name = "max_tokens" if "max_tokens" in body else "max_completion_tokens"
    room = max(1, model.context - len(ids))
    if name not in body and len(ids) >= model.context:
        text = f"messages have {len(ids)} tokens, but the context has {model.context}"
        raise APIError(400, text, "messages")
    params = _sampling_params(body, model, body.get(name, room), top, name)
    request = Request("", 0, ids, params, continues=False)
    options = dict(top_logprobs=top, max_tokens_field=name) | _stream_fields(body)
    return Call([request], chat=True, **options)


def known_fields(body: Any, fields: Set[str], model: Model) -> dict[str, Any]:
    """The fields that are not null. APIError for one that is not supported, or another model."""
    body = _object(body, "", fields)
    name, names = body.get("model", model.name), [model.name, *model.adapters]
    if name not in names:
        have = ", ".join(map(repr, names))
        raise APIError(404, f"there is no model {name!r}; this server has {have}", "model")
    return body


def _object(value: Any, path: str, fields: Collection[str]) -> dict[str, Any]:
    """The fields of an object that are not null. path: of the object in the body, "" for that."""
    if not isinstance(value, dict):
        raise APIError(400, f"{path or 'the body'} must be a JSON object", path or None)
    given = {name: x for name, x in value.items() if x is not None}
    for name in sorted(given.keys() - set(fields)):
        if given[name] not in ASKS_NOTHING.get(name, ()):
            at = f"{path}.{name}" if path else name
            text = f"{at} is not supported; supported: {', '.join(sorted(fields))}"
            raise APIError(400, text, at)
        del given[name]
    return given


def _sampling_params(
    body: Mapping[str, Any], model: Model, max_tokens: Any, logprobs: int | None,
    max_tokens_field: str = "max_tokens",
) -> SamplingParams:  # fmt: skip
    given = {ours: body[name] for name, ours in SAMPLING.items() if name in body}
    given.setdefault("seed", secrets.randbits(31))
    given["adapter"] = body["model"] if body.get("model") in model.adapters else None
    try:
        given["grammar"] = from_response_format(_response_format(body))
    except ValueError as e:
        raise APIError(400, str(e), "response_format") from None
    if "logit_bias" in given:
        given["logit_bias"] = _logit_bias(given["logit_bias"])
    if isinstance(n := given.get("n"), int) and n > MAX_N:
        raise APIError(400, f"n must be at most {MAX_N}, not {n}", "n")
    stop = given.get("stop", ())
    if isinstance(stop, list) and len(stop) > MAX_STOP:
        raise APIError(400, f"stop has {len(stop)} strings; at most {MAX_STOP}", "stop")
    strings = stop if isinstance(stop, list) else [stop]
    for text in strings:
        if isinstance(text, str) and len(text) > MAX_STOP_CHARS:
            raise APIError(400, f"stop: a string has at most {MAX_STOP_CHARS} characters", "stop")
    try:
        return SamplingParams(**given, max_new_tokens=max_tokens, logprobs=logprobs)
    except ValueError as e:
        raise invalid(e, max_tokens_field) from None


def _response_format(body: Mapping[str, Any]) -> dict[str, Any]:
    """response_format with known fields only; what is under `schema` is json_schema.py's."""
    name = "response_format"
    given = body.get(name, {"type": "text"})
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in RESPONSE_FORMATS:
        raise APIError(400, f"{name}.type must be {', '.join(RESPONSE_FORMATS)}", f"{name}.type")
    given = _object(given, name, {"type", *RESPONSE_FORMATS[kind]})
    if kind != "json_schema":
        return given
    path = f"{name}.{kind}"
    spec = _object(given.get(kind), path, {"schema", *JSON_SCHEMA})
    for key, wanted in JSON_SCHEMA.items():
        if key in spec and type(spec[key]) is not wanted:
            text = f"{path}.{key} must be of type {wanted.__name__}"
            raise APIError(400, text, f"{path}.{key}")
    return given | {kind: spec}


def _logit_bias(bias: Any) -> dict[int, float]:
    try:
        bias = parse_logit_bias(bias)
    except ValueError as e:
        raise APIError(400, str(e), "logit_bias") from None
    for token, value in bias.items():  # finite: what a grammar allows is never banned
        if type(value) not in (int, float) or not -100 <= value <= 100:
            wanted = f"logit_bias of token {token} must be from -100 to 100, not {value!r}"
            raise APIError(400, wanted, "logit_bias")
    return bias


def invalid(e: ValueError, max_tokens_field: str) -> APIError:
    """The Engine's ValueError, in the API's names."""
    text = str(e).replace("min_new_tokens", "min_tokens")
    text = text.replace("max_new_tokens", max_tokens_field)
    field = text.split()[0]
    return APIError(400, text, field if field in COMPLETION | CHAT else None)


def _typed(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name, default)
    if type(value) is not kind:
        raise APIError(400, f"{name} must be of type {kind.__name__}, not {value!r}", name)
    return value


def _integer(body: Mapping[str, Any], name: str, limit: int) -> int | None:
    value = body.get(name)
    if value is not None and not (type(value) is int and 0 <= value <= limit):
        raise APIError(400, f"{name} must be an integer from 0 to {limit}, not {value!r}", name)
    return value


def _prompts(prompt: Any, model: Model) -> list[list[int]]:
    """A text, a list of texts, a list of token ids, or a list of those."""
    prompts = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
    if not isinstance(prompts, list) or not prompts or len(prompts) > MAX_PROMPTS:
        wanted = f"a text, a list of token ids, or up to {MAX_PROMPTS} of either"
        raise APIError(400, f"prompt must be {wanted}", "prompt")
    for one in prompts:
        if not (isinstance(one, str) and one) and not _is_ids(one):
            raise APIError(400, "prompt must be non-empty text or token ids", "prompt")
    return [encode(p, model, "prompt") if isinstance(p, str) else p for p in prompts]


def _is_ids(value: Any) -> bool:
    """Whether it is a list of token ids, not empty."""
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def encode(text: str, model: Model, field: str, bos: bool = True) -> list[int]:
    """The token ids of a text. APIError names the field."""
    try:
        return model.tokenizer.encode_prompt(text, model.max_bytes, bos)
    except ValueError as e:
        raise APIError(400, f"{field} {e}", field) from None


def parse_tokenize(body: Any, model: Model) -> list[int]:
    """A body of POST /tokenize -> the token ids. APIError names the field."""
    body = known_fields(body, {"model", "prompt", "add_special_tokens"}, model)
    bos = _typed(body, "add_special_tokens", bool, True)
    return encode(_typed(body, "prompt", str, None), model, "prompt", bos)


def parse_detokenize(body: Any, model: Model) -> str:
    """A body of POST /detokenize -> the text. APIError names the field."""
    ids, V = known_fields(body, {"model", "tokens"}, model).get("tokens"), model.vocab_size
    if isinstance(ids, list) and len(ids) > model.context:
        raise APIError(400, f"tokens has {len(ids)} ids; at most {model.context}", "tokens")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < V for i in ids):
        raise APIError(400, f"tokens must be a list of token ids below {V}", "tokens")
    return model.tokenizer.decode(ids)


def _chat_prompt(messages: Any, model: Model, template: ChatTemplate | None) -> list[int]:
    if template is None:
        raise APIError(400, "this model has no chat template; use /v1/completions", "messages")
    try:
        prompt = template.prompt(messages)
    except ValueError as e:  # of the template, it begins with the file
        text = str(e).removeprefix(f"{template.source}: ")
        if text.startswith("messages"):
            raise APIError(400, text, re.match(r"[\w.\[\]]+", text)[0]) from None
        raise APIError(400, f"messages: {text}", "messages") from None
    return encode(prompt, model, "messages", bos=False)


def _stream_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """`stream`, `include_usage` and `user` of a Call."""
    stream, user = _typed(body, "stream", bool, False), _typed(body, "user", str, "")
    if len(user) > MAX_USER:
        raise APIError(400, f"user has {len(user)} characters; at most {MAX_USER}", "user")
    name = "stream_options"
    options = _object(body.get(name, {}), name, {"include_usage"})
    if options and not stream:
        raise APIError(400, f"{name} requires stream: true", name)
    include_usage = options.get("include_usage", False)
    if type(include_usage) is not bool:
        raise APIError(400, f"{name}.include_usage must be true or false", f"{name}.include_usage")
    return dict(stream=stream, user=user, include_usage=include_usage)


# --------------------------------------------------------------------------------------------------
# Responses
# --------------------------------------------------------------------------------------------------


class ResponseWriter:
    """Writes a Stream as the objects of one API call: `chunk` of each piece, or `response`."""

    def __init__(self, call: Call, stream: Stream, model: Model, seen: Sequence[Progress]):
        """seen: tokens and characters of each choice that the client has."""
        self.call, self.stream, self.model = call, stream, model
        self.started = [p.tokens + p.chars > 0 for p in seen]
        self.n_chars = [0] * len(seen)  # of each choice, before its next token: text_offset
        self.texts: dict[int, TextStream] = {}  # that _offsets counts
        for choice in [i for i, p in enumerate(seen) if p.tokens and call.top_logprobs is not None]:
            request, output, i = stream.sample(choice)
            self.n_chars[choice] = len(model.tokenizer.decode(request.ids)) if call.echo else 0
            self._offsets(choice, output.samples[i].token_ids[: seen[choice].tokens])

    def _head(self, chunk: bool) -> dict[str, Any]:
        kind = "chat.completion" if self.call.chat else "text_completion"
        kind += ".chunk" if chunk and self.call.chat else ""
        head = {"id": self.call.id, "object": kind, "created": self.call.created}
        return head | {"model": self.call.requests[0].params.adapter or self.model.name}

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """The role of a chat's choices."""
        if self.call.chat and not any(self.started):
            for choice in range(len(self.started)):
                yield self._chunk(choice, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """A choice's echoed prompt, if it is requested, comes with its first piece."""
        choice, text, logprobs = piece.choice, piece.text, None
        prompt = ("", None) if self.started[choice] or not self.call.echo else self._prompt(choice)
        self.started[choice] = True
        if self.call.no_output:
            text = ""
        else:
            logprobs = self._logprobs(choice, piece.tokens, piece.logprobs)
        text, logprobs = prompt[0] + text, _concat_logprobs(prompt[1], logprobs)
        delta: Any = {"content": text} if self.call.chat else text
        return self._chunk(choice, delta, logprobs, FINISH.get(piece.finish_reason or ""))

    def _chunk(self, choice: int, delta: Any, logprobs: Any, finish: str | None) -> dict[str, Any]:
        value = {"index": choice, "delta" if self.call.chat else "text": delta}
        value |= {"logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self.call.include_usage else {}
        return self._head(True) | {"choices": [value]} | usage

    def usage_chunk(self) -> dict[str, Any]:
        return self._head(True) | {"choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        prompt = sum(len(r.ids) for r in self.stream.requests)
        new = 0 if self.call.no_output else sum(p.tokens for p in self.stream.progress)
        return dict(prompt_tokens=prompt, completion_tokens=new, total_tokens=prompt + new)

    def response(self) -> dict[str, Any]:
        """The response of a call without `stream`, of a stream that has finished."""
        choices = [self._choice_of_response(i) for i in range(len(self.stream.progress))]
        return self._head(False) | {"choices": choices, "usage": self.usage()}

    def _choice_of_response(self, choice: int) -> dict[str, Any]:
        request, output, i = self.stream.sample(choice)
        text, sample = request.samples[i].text, output.samples[i]
        piece = Piece(choice, text, sample.token_ids, sample.logprobs, sample.finish_reason)
        value = self.chunk(piece)["choices"][0]
        if self.call.chat:
            value["message"] = {"role": "assistant", "content": text, "refusal": None}
            del value["delta"]
        return value

    # ---- prompts and log-probabilities ----

    def _prompt(self, choice: int) -> tuple[str, dict[str, Any] | None]:
        """Text and log-probabilities of an echoed prompt; its first token has none."""
        request, output, _ = self.stream.sample(choice)
        ids, text = request.ids, self.model.tokenizer.decode(request.ids)
        if self.call.top_logprobs is None:
            return text, None
        self.texts[choice] = TextStream(self.model.tokenizer)
        entries = self._logprobs(choice, ids, [(0.0, [], []), *output.prompt_logprobs])
        entries["token_logprobs"][0] = entries["top_logprobs"][0] = None
        del self.texts[choice]
        self.n_chars[choice] = len(text)  # with an incomplete character at its end
        return text, entries

    def _logprobs(
        self, choice: int, tokens: Sequence[int], logprobs: Sequence[LogProb]
    ) -> dict[str, Any] | None:
        """The logprobs object of consecutive tokens of a choice."""
        if self.call.top_logprobs is None:
            return None
        if self.call.chat:
            return {"content": [self._entry(t, *lp) for t, lp in zip(tokens, logprobs)]}
        piece = self.model.tokenizer.piece
        pieces = [piece(token) for token in tokens]
        top = []
        for text, (logprob, ids, best) in zip(pieces, logprobs):
            entries: dict[str, float] = {}
            # the sampled one too, as the API does, beyond the number asked for; of two tokens with
            # the same text, the likelier
            for name, x in zip((*map(piece, ids), text), (*best, logprob)):
                entries[name] = max(x, entries.get(name, x))
            top.append(entries)
        return {"tokens": pieces, "token_logprobs": [lp for lp, *_ in logprobs],
                "top_logprobs": top, "text_offset": self._offsets(choice, tokens)}  # fmt: skip

    def _offsets(self, choice: int, tokens: Sequence[int]) -> list[int]:
        """How much of a choice's text lies before each of its next tokens; a character of several
        tokens is text after the last of them."""
        if choice not in self.texts:
            (request, *_), tokenizer = self.stream.sample(choice), self.model.tokenizer
            keep_space = request.params.grammar is not None
            self.texts[choice] = TextStream(tokenizer, request.ids, keep_space)
        offsets = []
        for token in tokens:
            offsets.append(self.n_chars[choice])
            self.n_chars[choice] += len(self.texts[choice].push(token))
        return offsets

    def _entry(
        self, token: int, logprob: float, ids: Sequence[int], best: Sequence[float]
    ) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            tokenizer = self.model.tokenizer
            text, data = tokenizer.piece(token), tokenizer.token_bytes(token, token)
            return {"token": text, "logprob": logprob, "bytes": list(data or text.encode())}

        return entry(token, logprob) | {"top_logprobs": [*map(entry, ids, best)]}


def _concat_logprobs(a: dict[str, Any] | None, b: dict[str, Any] | None) -> dict[str, Any] | None:
    """Two logprobs objects of consecutive tokens as one."""
    return {name: a[name] + b[name] for name in a} if a and b else a or b
