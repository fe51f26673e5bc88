"""Conversations: from lines of JSONL to rows of tokens (data.py), rendered by a chat template.

    --data -> read_conversations -> chat_rows -> shards.Rows -> shards.Stream

Lines are OpenAI's fine-tuning format; unknown fields are errors that name file, line and field. The
pairs of DPO and the prompts of GRPO are read here too; dpo.py and grpo.py make rows of them.

Only what the assistant would generate is a target. The rendered text is encoded whole, as a prompt
is in generation, and targets are found by the characters of each token: pieces encoded alone would
get other ids, such as a space in front of every turn with Llama 2's tokenizer.

A token that straddles the border of a turn is a target, as in transformers' assistant masks. If a
turn's last character has several tokens, all are targets (in transformers the first alone). In
generation a prompt would end within a token that straddles: a template should end a prompt where a
token ends, as it does with a newline or a special token.

Equivalence (test_all.py): ids and masks of transformers' apply_chat_template. Part of train.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from huggingface.chat_template import parse_messages
from huggingface.tokenizer import Tokenizer
from training.data import (
    START,
    best_fit,
    is_padding,
    json_objects,
    list_some,
    one_per_row,
    pack_rows,
    parse_json,
    without_nulls,
)

Messages = list[dict[str, Any]]  # {"role": ..., "content": ...}, of parse_messages
# (messages, add_generation_prompt, and tools=... if there are any): a chat template
Render = Callable[..., str]


class Conversation(NamedTuple):
    """Messages, and the tools that their template is given."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    where: str = ""  # its file and line, for errors


class Preference(NamedTuple):
    """A prompt and two completions of it: strings, or lists of messages."""

    prompt: str | Messages
    chosen: str | Messages
    rejected: str | Messages
    tools: list[dict[str, Any]] | None = None
    where: str = ""  # its file and line, for errors


class Prompt(NamedTuple):
    """A prompt, and the reference answer of its reward."""

    prompt: str | Messages
    answer: str
    tools: list[dict[str, Any]] | None = None
    where: str = ""  # its file and line, for errors


class Question(NamedTuple):
    """A multiple-choice question. A choice continues the prompt: its leading space is its own."""

    prompt: str
    choices: list[str]
    answer: int  # index of the right choice


def _check(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


# --------------------------------------------------------------------------------------------------
# JSONL of conversations, preferences, prompts and questions
# --------------------------------------------------------------------------------------------------

# Fields that describe a line and are ignored; other unknown fields of chats and pairs are errors
METADATA = frozenset(
    "id prompt_id source category url language license timestamp meta metadata score_chosen "
    "score_rejected chosen_model rejected_model".split()
)
# of messages in training data; parse_messages does not know them
TRAINING_FIELDS = {"weight", "tool_calls", "tool_call_id"}
# another role, such as "Assistant" or "gpt", would silently be no target
ROLES = "system developer user assistant tool function ipython observation".split()
TOOL_FIELDS = {"type": str, "function": dict}
CALL_FIELDS = {"id": str, **TOOL_FIELDS}
FUNCTION_FIELDS = {
    "name": str, "description": str, "parameters": dict, "strict": bool, "return": dict,
}  # fmt: skip
_KINDS = {
    str: "a string", list: "a list of messages", int: "a number", float: "a number",
    dict: "an object", bool: "true or false",
}  # fmt: skip


def _field(where: str, found: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """found[name], checked to be of one of the kinds and not empty; a list is one of messages."""
    expected = " or ".join(dict.fromkeys(_KINDS[kind] for kind in kinds))
    if name not in found:
        others = f" (only {list_some([f'{other!r:.40}' for other in found])})" if found else ""
        raise ValueError(f'{where}: has no "{name}"{others}; give {expected}')
    value = found[name]
    if not isinstance(value, kinds) or isinstance(value, bool):
        kind = type(value).__name__
        raise ValueError(f'{where}: "{name}" must be {expected}, not {kind}')
    _check(value not in ("", []), f'{where}: "{name}" is empty')
    return _messages(f"{where}: {name}", value) if isinstance(value, list) else value


def _messages(where: str, value: list[Any]) -> Messages:
    """Messages of OpenAI's fine-tuning format: as parse_messages has them, with "weight" and tool
    calls, whose content may be null."""
    plain, training = [], []  # what parse_messages reads, and TRAINING_FIELDS
    for i, message in enumerate(value):
        if not isinstance(message, dict):
            raise ValueError(f"{where}[{i}] must be an object with role and content")
        given = without_nulls(message)
        training.append({name: given.pop(name) for name in TRAINING_FIELDS & given.keys()})
        content = {"content": ""} if training[-1].get("tool_calls") else {}
        plain.append(content | given)
    try:
        parsed = parse_messages(plain)
    except ValueError as e:
        raise ValueError(where + str(e).removeprefix("messages")) from None
    for i, (message, fields) in enumerate(zip(parsed, training)):
        role = message["role"]
        known = ", ".join(ROLES)
        _check(role in ROLES, f"{where}[{i}].role {role!r:.40} is not known; known: {known}")
        _add_own_fields(f"{where}[{i}]", message, fields)
        if value[i].get("content") is None:
            del message["content"]
    return parsed


def _add_own_fields(where: str, message: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Check TRAINING_FIELDS, and add them to a message. Arguments of calls become objects, which
    templates expect."""
    weight, calls = fields.get("weight", 1), fields.get("tool_calls", [])
    for name, given in (("tool_calls", calls), ("weight", "weight" in fields)):
        if given and message["role"] != "assistant":
            raise ValueError(f"{where}.{name} is a field of messages of the assistant")
    if type(weight) is not int or weight not in (0, 1):
        raise ValueError(f"{where}.weight must be 0 or 1, not {weight!r:.20}")
    _check(isinstance(calls, list), f"{where}.tool_calls must be a list")
    if not isinstance(fields.get("tool_call_id", ""), str):
        raise ValueError(f"{where}.tool_call_id must be text")
    calls = [_tool_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    message |= {**fields, "tool_calls": calls}
    if not calls:
        del message["tool_calls"]


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    """A call of a function, with its arguments as an object."""
    call = _function(where, call, CALL_FIELDS, {"name": str, "arguments": object})
    given = call["function"].get("arguments", {})
    try:
        arguments = parse_json(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        error = "function.arguments must be a JSON object, or one as a string"
        raise ValueError(f"{where}.{error}")
    return call | {"function": call["function"] | {"arguments": arguments}}


def _function(
    where: str, value: Any, fields: Mapping[str, type], inner: Mapping[str, type]
) -> dict[str, Any]:  # fmt: skip
    """A tool or a call, checked and without nulls. fields, inner: the types of its own fields, and
    of those of its "function"."""
    _check(isinstance(value, dict), f"{where} must be an object")
    outer = without_nulls(value)
    kind, function = outer.get("type", "function"), outer.get("function")
    if kind != "function" or not isinstance(function, dict):
        raise ValueError(f"{where}: must have the type function, and an object function")
    function = without_nulls(function)
    for at, given, types in ((where, outer, fields), (f"{where}.function", function, inner)):
        for name, content in given.items():
            known = ", ".join(types)
            _check(name in types, f"{at}.{name} is not supported; supported: {known}")
            if not isinstance(content, types[name]):
                raise ValueError(f"{at}.{name} must be {_KINDS[types[name]]}")
    _check("name" in function, f"{where}.function.name must be a string")
    return outer | {"function": function}


def _tools(where: str, found: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """found["tools"], checked; None if there are none."""
    tools = found.get("tools", [])
    _check(isinstance(tools, list), f'{where}: "tools" must be a list')
    parsed = []
    for i, tool in enumerate(tools):
        parsed.append(_function(f"{where}: tools[{i}]", tool, TOOL_FIELDS, FUNCTION_FIELDS))
    return parsed or None


def _unweighted(where: str, found: Mapping[str, Any], name: str) -> str | Messages:
    """A field that is text or messages; "weight" is for conversations alone."""
    text = _field(where, found, name, str, list)
    if isinstance(text, list):
        for i, message in enumerate(text):
            _check("weight" not in message, f"{where}: {name}[{i}].weight is for --task sft")
    return text


def _prompt(where: str, found: Mapping[str, Any], name: str) -> str | Messages:
    """A prompt, after which a turn of the assistant begins."""
    prompt = _unweighted(where, found, name)
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        fix = "the answer is a turn of its own; end the prompt with a turn before it"
        raise ValueError(f"{where}: {name}[-1] is a turn of the assistant, but {fix}")
    return prompt


def _read_items(
    path: Path, fields: Sequence[str], what: str, parse: Callable[[str, dict[str, Any]], Any]
) -> list[Any]:
    """parse("FILE: line N", object) of each line of JSONL, which has the fields, or some of them,
    and METADATA. ValueError names file, line, field."""
    items, names = [], " and ".join(f'"{name}"' for name in fields if name != "tools")
    for where, found in json_objects(path, names):
        items.append(parse(where, found))
        if unknown := found.keys() - {*fields, *METADATA}:
            known = ", ".join(fields)
            raise ValueError(f'{where}: unknown field "{min(unknown)}" (known: {known}); remove it')
    _check(items, f"{path}: holds no {what}")
    return items


def read_conversations(path: Path) -> list[Conversation]:
    """Conversations of JSONL with "messages" and, optionally, "tools"."""

    def parse(where: str, found: dict[str, Any]) -> Conversation:
        messages = _field(where, found, "messages", list)
        return Conversation(messages, _tools(where, found), where)

    return _read_items(path, ("messages", "tools"), "conversations", parse)


def read_preferences(path: Path) -> list[Preference]:
    """Pairs of JSONL with "prompt" (or "messages"), "chosen", "rejected" and, optionally,
    "tools"."""

    def parse(where: str, found: dict[str, Any]) -> Preference:
        both = "messages" in found and "prompt" in found
        _check(not both, f'{where}: has both "prompt" and "messages"; remove one')
        prompt = _prompt(where, found, "messages" if "messages" in found else "prompt")
        replies = [_unweighted(where, found, name) for name in ("chosen", "rejected")]
        return Preference(prompt, *replies, _tools(where, found), where)

    fields = "prompt", "messages", "chosen", "rejected", "tools"
    return _read_items(path, fields, "pairs", parse)


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of JSONL with "prompt", "answer" and, optionally, "tools"."""

    def parse(where: str, found: dict[str, Any]) -> Prompt:
        prompt = _prompt(where, found, "prompt")
        answer = _field(where, found, "answer", str, int, float)
        finite = isinstance(answer, str) or math.isfinite(answer)
        _check(finite, f'{where}: "answer" must be a finite number, not {answer}')
        return Prompt(prompt, str(answer), _tools(where, found), where)

    return _read_items(path, ("prompt", "answer", "tools"), "prompts", parse)


def read_questions(path: Path) -> list[Question]:
    """Multiple-choice questions of JSONL with "prompt", "choices" and "answer"."""

    def parse(where: str, found: dict[str, Any]) -> Question:
        prompt, answer = _field(where, found, "prompt", str), _field(where, found, "answer", int)
        choices = found.get("choices")
        texts = isinstance(choices, list) and all(isinstance(c, str) and c for c in choices)
        if not texts or len(choices) < 2:
            raise ValueError(f'{where}: "choices" must be two or more texts, none empty')
        if not 0 <= answer < len(choices):
            most = len(choices) - 1
            raise ValueError(f'{where}: "answer" must be from 0 to {most}, not {answer}')
        return Question(prompt, choices, answer)

    return _read_items(path, ("prompt", "choices", "answer"), "questions", parse)


# --------------------------------------------------------------------------------------------------
# Rendered conversations as rows
# --------------------------------------------------------------------------------------------------


def assistant_spans(
    messages: Messages, render: Render, first: int = 0
) -> tuple[str, list[tuple[int, int]]]:  # fmt: skip
    """The rendered conversation, and the spans of its characters that the assistant would generate:
    in each of its turns from messages[first] on, but not in those of "weight" 0, everything after
    the generation prompt, with the text that ends the turn.

    The start of a turn is found by rendering the conversation up to it. ValueError if that is not a
    prefix of the full rendering (a template that changes earlier turns).
    """
    messages = [dict(message) for message in messages]
    weights = [message.pop("weight", 1) for message in messages]  # templates do not know it
    whole, done, spans = render(messages, False), 0, []
    _check(whole, "messages: the chat template renders them as empty text")
    for i, message in enumerate(messages):
        if i < first or message["role"] != "assistant":
            continue
        _check(i > 0, "messages[0] is from the assistant; begin with the user or the system")
        before, after = render(messages[:i], True), render(messages[: i + 1], False)
        _check(
            after.startswith(before) and whole.startswith(after) and len(before) >= done,
            f"messages[{i}]: the chat template renders earlier messages differently than in the "
            "whole conversation; split the conversation here, or change the template",
        )
        done = len(after)
        if weights[i]:
            spans.append((len(before), done))
    return whole, spans


def encode_spans(text: str, spans: Sequence[tuple[int, int]], tokenizer: Tokenizer) -> Tensor:
    """A text as encoded values (n,) int32. Targets are the tokens with a character in one of the
    spans, which are in order and do not overlap."""
    values, k = [], 0
    for id, (start, end) in zip(*tokenizer.encode_with_offsets(text)):
        while k < len(spans) and spans[k][1] <= start:
            k += 1
        # a token that the tokenizer inserted has no characters: start == end
        is_target = k < len(spans) and (spans[k][0] < end or spans[k][0] == start)
        values.append(id if is_target else ~id)
    return torch.tensor(values, dtype=torch.int32)


def chat_tokens(messages: Messages, render: Render, tokenizer: Tokenizer) -> Tensor:
    """One conversation as encoded values (n,) int32, with the targets of assistant_spans.
    ValueError if there are none."""
    text, spans = assistant_spans(messages, render)
    _check(spans, "messages: none is from the assistant (with weight 1), so there are no targets")
    values = encode_spans(text, spans, tokenizer)
    _check(has_targets(values), "messages: the assistant's are empty text, so there are no targets")
    return values


def check_rendered(messages: Messages, tools: list[Any] | None, render: Render) -> None:
    """ValueError for tools, tool calls or reasoning that the chat template leaves out: the rows
    would be those of another conversation."""

    def rendered(messages: Messages, tools: list[Any] | None) -> str | None:
        try:
            return with_tools(render, tools)(messages, False)
        except ValueError:  # the template needs what was removed
            return None

    error = "the chat template does not render it; remove it, or give --init one that does"
    if tools:
        text = with_tools(render, tools)(messages, False)
        _check(text != rendered(messages, None), f'"tools": {error}')
    for name in "tool_calls", "reasoning_content", "reasoning", "thinking":
        if any(name in message for message in messages):
            text = with_tools(render, tools)(messages, False)
            without = [{k: v for k, v in m.items() if k != name} for m in messages]
            _check(text != rendered(without, tools), f"messages: {name}: {error}")


def has_targets(values: Tensor) -> bool:
    """Whether a row that begins with these values has a target: the first one never is."""
    return bool((values[1:] >= 0).any())


def map_items(
    name: str, items: Iterable[Any] | Mapping[int, Any], make: Callable[[Any], Any]
) -> list[Any]:
    """make(item) of all items. A ValueError begins with the item's file and line or, if it has
    none, with its number from 1 or, in a mapping, its key."""
    made = []
    for n, item in items.items() if isinstance(items, Mapping) else enumerate(items, 1):
        try:
            made.append(make(item))
        except ValueError as e:
            raise ValueError(f"{item.where or f'{name} {n}'}: {e}") from None
    _check(made, f"{name}s: there are none")
    return made


def chat_rows(
    conversations: Iterable[Conversation] | Mapping[int, Conversation], render: Render,
    tokenizer: Tokenizer, seq_len: int, pack: bool,
) -> Tensor:  # fmt: skip
    """Conversations as encoded rows (R, seq_len + 1) int32, best-fit packed or one per row. Longer
    ones are split over several rows. ValueError of chat_tokens, with the number (or key)."""

    def tokens(chat: Conversation) -> Tensor:
        check_rendered(chat.messages, chat.tools, render)
        return chat_tokens(chat.messages, with_tools(render, chat.tools), tokenizer)

    documents = map_items("conversation", conversations, tokens)
    rows = pack_rows(documents, seq_len, best_fit if pack else one_per_row)
    targets = (rows >= 0) & (rows < START)
    return rows[targets.any(1)]  # drop pieces without targets (prompt only)


def with_tools(render: Render, tools: list[Any] | None) -> Render:
    return partial(render, tools=tools) if tools else render


def as_messages(given: str | Messages, role: str) -> Messages:
    return [{"role": role, "content": given}] if isinstance(given, str) else given


def padding_hint(rows: Tensor, flags: str) -> str | None:
    """What to do if most inputs of encoded rows (R, T + 1) are padding, which is computed like
    other tokens; else None. flags: those that avoid it, beside a smaller --seq-len."""
    padding, T = is_padding(rows), rows.shape[1] - 1
    longest = int((~padding).sum(1).max())
    share, enough = padding.float().mean().item(), math.ceil(longest / 64) * 64
    if share <= 0.5:
        return None
    fits = [f"--seq-len {enough}"] if enough < T else []
    fix = " or ".join([*fits, *flags.split()]) or "a smaller --seq-len"
    return f"{share:.0%} of the tokens are padding (rows of {T}, the longest has {longest}): {fix}"
