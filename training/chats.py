"""Conversations and preference pairs as rows of tokens (data.py), rendered by a chat template.

    chats -> chat_rows, pairs -> preference_rows -> shards.Rows -> shards.Stream

Only what the assistant would generate is a target. Part of train.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from training.data import BOS, EOS, START, Messages, Preference, best_fit, encode_row
from training.data import one_per_row, pack_rows

Render = Callable[[Messages, bool], str]  # (messages, add_generation_prompt): a chat template


def _check(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


def chat_tokens(messages: Messages, render: Render, encode: Callable[[str], list[int]]) -> Tensor:
    """One conversation as encoded values (n,) int32. Targets are what the assistant would generate:
    in each of its turns everything after the generation prompt, with the text that ends the turn.

    The start of a turn is found by rendering the conversation up to it. ValueError if that is not a
    prefix of the full rendering (a template that changes earlier turns), or if no turn is the
    assistant's.
    """
    whole, done, parts = render(messages, False), 0, []
    _check(whole, "messages: the chat template renders them as empty text")
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(messages[:i], True), render(messages[: i + 1], False)
        _check(
            after.startswith(before) and whole.startswith(after) and len(before) >= done,
            f"messages[{i}]: the chat template renders earlier messages differently than in the "
            "whole conversation; split the conversation here, or change the template",
        )
        parts += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
        done = len(after)
    _check(parts, "messages: none is from the assistant, so there are no targets")
    coded = []
    for text, target in [*parts, (whole[done:], False)]:
        ids = encode(text) if text else []
        coded += ids if target else [~i for i in ids]
    return torch.tensor(coded, dtype=torch.int32)


def _map_items(
    name: str, items: Iterable[Any] | Mapping[int, Any], make: Callable[[Any], Any]
) -> list[Any]:
    """[make(item) of all items]; ValueErrors get the item's number from 1, or its key."""
    made = []
    for n, item in items.items() if isinstance(items, Mapping) else enumerate(items, 1):
        try:
            made.append(make(item))
        except ValueError as e:
            raise ValueError(f"{name} {n}: {e}") from None
    _check(made, f"{name}s: there are none")
    return made


def chat_rows(
    conversations: Iterable[Messages] | Mapping[int, Messages], render: Render,
    encode: Callable[[str], list[int]], seq_len: int, pack: bool,
) -> Tensor:  # fmt: skip
    """Conversations as encoded rows (R, seq_len + 1) int32, best-fit packed or one per row. Longer
    ones are split over several rows. ValueError of chat_tokens, with the number (or key)."""
    tokens = lambda messages: chat_tokens(messages, render, encode)
    documents = _map_items("conversation", conversations, tokens)
    rows = pack_rows(documents, seq_len, best_fit if pack else one_per_row)
    targets = (rows >= 0) & (rows < START)
    return rows[targets.any(1)]  # drop pieces without targets (prompt only)


def preference_rows(
    pairs: Iterable[Preference] | Mapping[int, Preference], render: Render | None,
    encode: Callable[[str], list[int]], seq_len: int,
) -> Tensor:  # fmt: skip
    """Pairs as encoded rows (2 * n, seq_len + 1) int32: chosen, rejected, chosen, ... Completions
    are targets, truncated at the end of the row.

    Strings are rendered as a user and an assistant message; without `render` they are plain text
    between BOS and EOS. Completions may repeat the prompt's messages. ValueError if a prompt leaves
    no room for its completion.
    """

    def row(prompt: Any, completion: Any) -> Tensor:
        if render is None:
            plain = isinstance(prompt, str) and isinstance(completion, str)
            _check(plain, "messages require a chat template; give strings, or a model with one")
            context, text = [BOS, *encode(prompt)], [*encode(completion), EOS]
        else:
            messages, reply = _messages(prompt, "user"), _messages(completion, "assistant")
            reply = reply[len(messages) :] if reply[: len(messages)] == messages else reply
            before, whole = render(messages, True), render([*messages, *reply], False)
            ok = whole.startswith(before)
            _check(ok, "the chat template renders the prompt differently before a completion")
            context, text = encode(before), encode(whole[len(before) :])
        room = seq_len + 1 - len(context)
        error = f"its prompt, {len(context)} tokens, leaves no room in a row of {seq_len + 1}"
        _check(room > 0, f"{error}; remove it, or increase --seq-len")
        return encode_row([*context, *text[:room]], len(context), seq_len)

    pair_rows = lambda pair: torch.stack([row(pair[0], completion) for completion in pair[1:]])
    return torch.cat(_map_items("pair", pairs, pair_rows))


def _messages(given: str | Messages, role: str) -> Messages:
    return [{"role": role, "content": given}] if isinstance(given, str) else given
