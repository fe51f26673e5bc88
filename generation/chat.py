"""Chat in the terminal (--interactive of generate.py): each turn prefills only new tokens."""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from generation.config import GenerateConfig
from huggingface.chat_template import ChatTemplate
from huggingface.tokenizer import Continuation, StopStrings, TextStream, Tokenizer, check_utf8
from paged_kv import SamplingParams

STATE = dict(messages=list, ids=list, text=str, ids_match_text=bool, turn=int, ends=list)


class Chat:
    """A conversation over one KV cache: each turn prefills only tokens that are not cached.

    With a chat template every turn renders the whole conversation; without one, the prompt is all
    text so far plus the new line. The cache keeps the ids that were generated, even if their text
    would be tokenized differently: if the new text extends the old, the old ids are kept and only
    the ids of the new part are added. If not (templates that rewrite earlier turns), the cache is
    truncated to the longest common prefix.
    """

    def __init__(
        self,
        decoder: Any,
        run_rows: Callable[..., Iterator[list[list[int]]]],
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        system: str | None = None,
        history: Any = None,
    ):
        """decoder, run_rows: generate.py's Decoder, and its loop over the steps of a prompt.
        history: prompt_cache.py's History, whose conversation is continued."""
        self.decoder, self.run_rows, self.tokenizer = decoder, run_rows, tokenizer
        self.template, self.system, self.history = template, system, history
        self.reset()
        state = {} if history is None else history.restore(STATE)
        if state.get("messages", [])[: len(self.messages)] == self.messages:
            for name, value in state.items():
                setattr(self, name, value)
        else:  # it had another system prompt
            self.reset()

    def reset(self) -> None:
        """Start a new conversation."""
        if self.history is not None:
            self.history.store.lineage = b""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.ids: list[int] = []  # prompt and reply of the last turn
        self.text = ""  # their text
        self.ids_match_text = False  # whether ids decode to exactly this text
        self.turn = 0
        self.ends: list[tuple[int, int]] = []  # of each turn in ids and text

    def encode_turn(self, line: str) -> tuple[str, list[int]]:
        """The conversation with this user message, as text and ids."""
        if self.template is None:
            text = self.text + line
        else:
            text = self.template.prompt([*self.messages, {"role": "user", "content": line}])
        encode = partial(self.tokenizer.encode, bos=self.template is None)
        whole = encode(text)
        if self.ids_match_text and text.startswith(self.text):
            before = encode(self.text)
            if whole[: len(before)] == before:
                return text, self.ids + whole[len(before) :]
        return text, whole

    def ask(
        self, line: str, params: SamplingParams, max_new: int, row: Continuation, limit: int
    ) -> Iterator[int]:
        """Generate the reply into `row`. Yields first the number of prompt ids in the cache,
        then the number of new tokens of each step; the caller may close it after any step (Ctrl-C).
        ValueError if the conversation is too long."""
        text, ids = self.encode_turn(line)
        if len(ids) >= limit and self.history is not None:
            text, ids = self._drop_turns(line, limit)
        if not ids:
            raise ValueError("the prompt has no tokens; enter some text")
        if len(ids) >= limit:
            raise ValueError(
                f"the conversation has {len(ids)} tokens, but the cache holds {limit}; /reset or "
                "increase --set ctx_size"
            )
        # at least one token must run, for its logits
        reusable = min(self.decoder.num_cached, len(self.ids), len(ids) - 1)
        cached = next((i for i in range(reusable) if ids[i] != self.ids[i]), reusable)
        if self.history is not None:
            cached = self.history.find(ids, cached)
        if self.template is None:  # without a template the text continues the prompt's
            row.stream = TextStream(self.tokenizer, ids)
        yield cached
        self.ids, self.text, self.turn = ids, text, self.turn + 1
        seed = (params.seed + self.turn - 1) % 2**63  # a different seed in each turn
        self.decoder.sampler.admit(0, replace(params, seed=seed), ())
        try:
            for tokens in self.run_rows(
                self.decoder, ids, [row], min(max_new, limit - len(ids)), cached=cached
            ):
                yield len(tokens[0])
        finally:  # also after Ctrl-C
            row.end("interrupted")
            self._append_turn(line, row)
            if self.history is not None:
                self.history.save(self.ids)
            self.write()

    def write(self) -> None:
        """With a history, save the conversation for the next start of the program."""
        if self.history is not None:
            self.history.write({name: getattr(self, name) for name in STATE})

    def _append_turn(self, line: str, row: Continuation) -> None:
        self.messages += [
            {"role": "user", "content": line},
            {"role": "assistant", "content": row.text},
        ]
        tokens, text = row.tokens, row.text
        if row.finish_reason == "eos" and self.template is None:
            tokens = tokens[:-1]  # an EOS inside the text would end it there
        elif row.finish_reason == "eos":
            text += self.tokenizer.piece(tokens[-1])  # the template writes EOS as text
        self.ids, self.text = self.ids + tokens, self.text + text
        self.ids_match_text = row.finish_reason != "stop"  # else they include the stop string
        self.ends.append((len(self.ids), len(self.text)))

    def _drop_turns(self, line: str, limit: int) -> tuple[str, list[int]]:
        """encode_turn without the oldest turns, so that the prompt has half of the context at most
        (AttentionStore's truncation ratio); the KV of the others is kept."""
        old, (text, ids) = self.ids, self.encode_turn(line)
        system = sum(m["role"] == "system" for m in self.messages[:1])
        bos = len(self.tokenizer.encode("", bos=self.template is None))
        while self.ends and len(ids) > limit // 2:
            n_ids, n_text = self.ends.pop(0)
            self.ends = [(i - n_ids + bos, j - n_text) for i, j in self.ends]
            self.ids, self.text = self.ids[:bos] + self.ids[n_ids:], self.text[n_text:]
            del self.messages[system : system + 2]
            text, ids = self.encode_turn(line)
        self.decoder.num_cached = self.history.shorten(old, ids)
        self.ids = ids[: self.decoder.num_cached]
        return text, ids


def chat_loop(args: GenerateConfig, chat: Chat, eos: Sequence[int], limit: int) -> None:
    """One reply per input line, in a cache of `limit` slots. Ctrl-C stops the reply, not the
    program."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="surrogateescape")  # check_utf8 names the byte
    if chat.template is None:
        print("This checkpoint has no chat template: it continues your text.", file=sys.stderr)
    print(f"{limit} tokens of context. /reset: new conversation; /quit: exit.", file=sys.stderr)
    if chat.turn:
        print(f"This continues a conversation of {len(chat.ids)} tokens.", file=sys.stderr)
    while (line := read_line()) is not None and line.strip() != "/quit":
        if line.strip() == "/reset":
            chat.reset()
            chat.write()
            print("new conversation", file=sys.stderr)
        elif line:
            try:
                run_turn(args, chat, check_utf8(line, "the line"), eos, limit)
            except ValueError as e:
                print(f"generate.py: {e}", file=sys.stderr)


def read_line() -> str | None:
    """A line of user input; None at the end of input."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            print("\nenter /quit to exit", file=sys.stderr)


def run_turn(args: GenerateConfig, chat: Chat, line: str, eos: Sequence[int], limit: int) -> None:
    """Stream one reply, then print how many prompt tokens were cached."""
    show = partial(print, end="", flush=True)
    start, cached = time.perf_counter(), 0
    stop = StopStrings(args.stop, chat.tokenizer)
    row = Continuation(
        chat.tokenizer, TextStream(chat.tokenizer), stop, eos, show, min_tokens=args.min_new_tokens
    )
    steps = chat.ask(line, args.sampling_params, args.max_new_tokens, row, limit)
    try:
        cached = next(steps)
        for _ in steps:
            pass
    except KeyboardInterrupt:
        steps.close()
    print()
    interrupted = row.finish_reason == "interrupted"
    print(
        f"[{len(chat.ids)} tokens, {cached} of them from the cache, {len(row.tokens)} new in "
        f"{time.perf_counter() - start:.2f} s{', interrupted' * interrupted}]",
        file=sys.stderr,
    )
