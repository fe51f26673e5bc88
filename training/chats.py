"""Conversations and preference pairs as rows of tokens (data.py), rendered by a chat template.

    chats -> chat_rows, pairs -> preference_rows -> shards.Rows -> shards.Stream

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
from typing import Any

import torch
from torch import Tensor

from huggingface.tokenizer import Tokenizer
from training.data import (
    START,
    Conversation,
    Messages,
    best_fit,
    is_padding,
    one_per_row,
    pack_rows,
)

# (messages, add_generation_prompt, and tools=... if there are any): a chat template
Render = Callable[..., str]


def _check(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


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
