"""Structured output: sampling only text that matches a regular expression.

A model asked for JSON mostly writes JSON. To make it certain, the pattern is compiled to a finite
state machine over bytes, and in each state only tokens whose bytes lead to another state keep their
logits (Outlines, arXiv:2307.09702). EOS is allowed in accepting states, and alone where the text is
complete. generation/json_schema.py makes patterns of JSON schemas.

Much of such a text is not the model's choice: after `{"na` follows `me":"`. A chain of states with
one transition each is one edge of a *compressed* machine, and its text is appended without
sampling (SGLang, arXiv:2312.07104, section 4). Two things follow:

    canonical tokens  a forced text has many tokenizations, and the model knows the tokenizer's own.
                      A token may end inside a chain only if the tokenizer's encoding of (its text +
                      the rest of the chain) begins with it: `na` is not allowed before `me`. The
                      last token of a chain may go on into the free text behind it, as ` "` does.
    jump              where that leaves one token it has probability 1, so it is a draft that
                      verification always accepts (ForcedTokens): all forced tokens run in the
                      forward pass of the last token before them. Text and seeds are as without.

Cost: a state's mask takes one pass of its transitions over the bytes of the vocabulary, a fraction
of a millisecond to a few for 150k tokens, and is kept; a row without a grammar costs nothing. Gain:
every text that ends by itself matches, and a JSON object's keys and punctuation take no decode
steps of their own. When it loses: text that the model finds unlikely stays bad text; a text cut by
max_new_tokens is a prefix; a machine can be exponentially larger than its pattern, as that of
(a|b)*a(a|b){30} is, so a process with bounded time and memory compiles it (50 ms); --speculate
tree masks, but does not jump, since its step has one tree for all rows.

Hook: SamplingParams.grammar, which generation/sampling.py masks with, and the drafters of
speculative.py. Equivalence (test_all.py): allowed tokens == those of a search over all texts of
the pattern; texts match, also sampled, batched, preempted and speculative; with jumps == without,
in fewer forward passes. Needs: torch, numpy; outlines-core (the Rust regex automaton).
"""

from __future__ import annotations

import codecs
import inspect
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_STATES, MAX_SECONDS, MAX_BYTES = 20_000, 10, 2**31  # of a DFA and its compilation
ONE_AT_A_TIME = threading.Lock()
LOOKAHEAD = 256  # bytes of a forced chain that are read, more than any token has
MAX_FORCED_TOKENS = 32  # drafts per step: forced tokens must run anyway, so many at once
MASKS_KEPT = 256  # of a Grammar, least recently used first out: 40 MB for 150k tokens

# --------------------------------------------------------------------------------------------------
# Patterns
# --------------------------------------------------------------------------------------------------

# Ends what outlines-core compiles, and is in no text: its own treatment of the end is of leftmost
# matches, which never go on after an accepting state (a|ab gives a alone).
END = "\U0010ffff"
ATOM = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)


def without_anchors(pattern: str) -> str:
    """A pattern less ^ and $ at its ends, which are redundant where it must match a whole text."""
    return re.sub(r"(?<!\\)((?:\\\\)*)\$$", r"\1", pattern.removeprefix("^"))


@lru_cache(16)  # of up to 20 MB
def compile_dfa(pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """A regular expression that must match a whole text -> its DFA over UTF-8: transitions (states,
    256), -1 for none, from state 0; accepting (states,) bool. An accepting state can be reached
    from each. The syntax is that of Rust's regex, which Python's mostly is; ^ and $ at the ends are
    redundant. ValueError, which the caller puts the setting's name before: it is invalid or too
    large."""
    if find_spec("outlines_core") is None:
        raise ValueError("requires outlines-core: pip install outlines-core==0.2.14")
    depths = accumulate((atom == "(") - (atom == ")") for atom in ATOM.findall(pattern))
    if min(depths, default=0) < 0:
        raise ValueError("cannot be compiled: it has an unopened group")
    large = f"is too large: over {MAX_STATES} states or {MAX_SECONDS} s to compile; repeat less"
    if re.search(r"(?<!\\)\{[\d,]*\d{6}", pattern):  # repeats 100,000 times or more
        raise ValueError(large)
    code = f"{inspect.getsource(_index)}\n_index({MAX_STATES}, {MAX_SECONDS}, {MAX_BYTES})"
    text = f"(?:{without_anchors(pattern)}){END}".encode(errors="surrogatepass")
    with ONE_AT_A_TIME:
        done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True)
    if done.returncode:
        raise ValueError(large)
    result = pickle.loads(done.stdout)
    if isinstance(result, str):
        why = " ".join(result.split())[:150]
        raise ValueError(f"cannot be compiled, or matches nothing ({why})")
    return _table(*result)


def _index(max_states: int, seconds: int, n_bytes: int) -> None:
    """A process of its own, which ends when it exceeds a limit: a regular expression -> its first
    state, its accepting states and the transitions, or why it is invalid."""
    import pickle
    import resource
    import sys

    import outlines_core

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (n_bytes, n_bytes))
    try:
        bytes_ = outlines_core.Vocabulary(256, {bytes([i]): [i] for i in range(256)})
        index = outlines_core.Index(sys.stdin.buffer.read().decode(), bytes_)
        result = index.get_initial_state(), index.get_final_states(), index.get_transitions()
        if len(result[2]) > max_states:
            sys.exit(1)
    except ValueError as e:
        result = str(e)
    pickle.dump(result, sys.stdout.buffer)


def _table(
    start: int, final: set[int], edges: dict[int, dict[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """What _index found -> transitions and accepting states."""
    number = {state: i for i, state in enumerate((start, *sorted(edges.keys() - {start})))}
    dead = len(number)  # a last row, of no transitions
    table = np.full((dead + 1, 256), dead)
    for state, to in edges.items():
        bytes_of = [byte for byte in to if byte < 256]  # 256 is outlines-core's EOS
        table[number[state], bytes_of] = [number.get(to[byte], dead) for byte in bytes_of]
    ends, is_final = np.arange(dead + 1), np.zeros(dead + 1, bool)
    is_final[[number[state] for state in final]] = True
    for byte in END.encode():
        ends = table[ends, byte]
    accepting = is_final[ends]
    table[is_final[table]] = dead  # of END
    return _prune(table, accepting)


def _prune(table: np.ndarray, accepting: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without transitions to states from which no accepting one can be reached, such as the last
    state, which has none."""
    alive, before = accepting.copy(), [[] for _ in table]
    for edge in np.unique(np.arange(len(table))[:, None] * len(table) + table):
        before[edge % len(table)].append(edge // len(table))
    stack = accepting.nonzero()[0].tolist()
    while stack:
        new = [state for state in before[stack.pop()] if not alive[state]]
        alive[new] = True
        stack += new
    return np.where(alive[table], table, -1).astype(np.int32)[:-1], accepting[:-1]


# --------------------------------------------------------------------------------------------------
# Grammars
# --------------------------------------------------------------------------------------------------


class Vocabulary:
    """A tokenizer as bytes, shared by the Grammars of all requests."""

    def __init__(
        self,
        tokens: Sequence[bytes | None],
        eos_ids: Iterable[int],
        encode: Callable[[str], list[int]],
    ):
        """tokens: the bytes that each id adds amid a text; those without are never allowed.
        encode: text that continues another -> its ids. Of several tokens with the same bytes
        (sentencepiece's bytes) only the one that encode gives is used."""
        self.eos_ids = [i for i in eos_ids if i < len(tokens)]
        if not self.eos_ids:
            raise ValueError("requires a model with an end-of-sequence token")
        self.tokens, self.encode = [token or b"" for token in tokens], encode
        for i in self.eos_ids:
            self.tokens[i] = b""
        kept: dict[bytes, int] = {}
        for i, token in enumerate(self.tokens):
            if token not in kept or self.canonical(token) == i:
                kept[token] = i
        kept_ids = set(kept.values())
        self.tokens = [t if i in kept_ids else b"" for i, t in enumerate(self.tokens)]
        self.lengths = np.array([len(token) for token in self.tokens])
        self.offsets = self.lengths.cumsum() - self.lengths
        self.bytes = np.frombuffer(b"".join(self.tokens), np.uint8)
        self.ids = self.lengths.nonzero()[0]
        self.grammar = lru_cache(16)(partial(Grammar, self))  # pattern -> its Grammar

    @classmethod
    def of(cls, tokenizer: Any, vocab_size: int, eos_ids: Iterable[int]) -> Vocabulary:
        """Of a tokenizer with huggingface/tokenizer.py's methods, and a model's vocabulary."""
        tokens = [tokenizer.token_bytes(i, i) for i in range(vocab_size)]
        return cls(tokens, eos_ids, tokenizer.encode_continuation)

    def canonical(self, data: bytes) -> int | None:
        """The first token of the tokenizer's encoding of data, less an incomplete character at its
        end; None if data starts inside a character, or encode adds to it."""
        try:
            text = codecs.utf_8_decode(data, "strict", False)[0]
        except UnicodeDecodeError:
            return None
        first = self.encode(text)[:1] if text else []
        known = first and self.tokens[first[0]]
        return first[0] if known and data.startswith(known) else None

    def walk(self, table: np.ndarray, state: int) -> np.ndarray:
        """(V,) the state after each token, -1 where the token is not allowed."""
        ends = np.full(len(self.tokens), -1)
        ids, states, depth = self.ids, np.full(len(self.ids), state), 0
        while len(ids):
            states = table[states, self.bytes[self.offsets[ids] + depth]]
            ids, states, depth = ids[states >= 0], states[states >= 0], depth + 1
            complete = self.lengths[ids] == depth
            ends[ids[complete]] = states[complete]
            ids, states = ids[~complete], states[~complete]
        return ends


class Grammar:
    """The tokens of a Vocabulary that a pattern allows. States are integers, from `start`; -1 is
    after EOS or a token that is not allowed, and constrains nothing."""

    start = 0

    def __init__(self, vocabulary: Vocabulary, pattern: str):
        """ValueError as compile_dfa."""
        self.vocabulary, self.pattern = vocabulary, pattern
        self.table, self.accepting = compile_dfa(pattern)
        self.vocab_size = len(vocabulary.tokens)
        self.in_chain = ((self.table >= 0).sum(1) == 1) & ~self.accepting
        self.forced = lru_cache(None)(self._forced)
        self.mask_and_forced = lru_cache(MASKS_KEPT)(self._mask_and_forced)
        if not self.allowed(self.start).any():
            raise ValueError("begins with characters that no token has")

    def advance(self, state: int, token: int) -> int:
        """The state after a token."""
        data = self.vocabulary.tokens[token] if state >= 0 and token >= 0 else b""
        for byte in data:
            state = int(self.table[state, byte])
            if state < 0:
                break
        return state if data else -1

    def allowed(self, state: int) -> Tensor:
        """(V,) bool: the tokens that may follow."""
        return self.mask_and_forced(state)[0]

    def forced_tokens(self, state: int, limit: int) -> list[int]:
        """The next tokens as long as one alone is allowed, EOS included."""
        ids: list[int] = []
        while len(ids) < limit and (token := self.mask_and_forced(state)[1]) is not None:
            ids.append(token)
            state = self.advance(state, token)
        return ids

    def _forced(self, state: int) -> bytes:
        """The bytes that must follow, up to a choice, the end, or LOOKAHEAD."""
        data = bytearray()
        while self.in_chain[state] and len(data) < LOOKAHEAD:
            data.append(int(self.table[state].argmax()))
            state = self.table[state, data[-1]]
        return bytes(data)

    def _mask_and_forced(self, state: int) -> tuple[Tensor, int | None]:
        """allowed(state), and the only such token if there is one."""
        if state < 0:
            return torch.ones(self.vocab_size, dtype=torch.bool), None
        vocabulary, ends = self.vocabulary, self.vocabulary.walk(self.table, state)
        allowed = ends >= 0
        for i in (allowed & self.in_chain[ends]).nonzero()[0].tolist():
            first = vocabulary.canonical(vocabulary.tokens[i] + self.forced(int(ends[i])))
            allowed[i] = first is None or first == i
        if not allowed.any():  # encode is not consistent: any tokenization then
            allowed = ends >= 0
        if self.accepting[state]:
            allowed[vocabulary.eos_ids] = True
        ids = allowed.nonzero()[0]
        return torch.from_numpy(allowed), int(ids[0]) if len(ids) == 1 else None


# --------------------------------------------------------------------------------------------------
# Jumps
# --------------------------------------------------------------------------------------------------


class ForcedTokens:
    """A drafter: the tokens that a row's grammar forces, else the drafts of another drafter. Its
    ForcedPolicy is asked first, in every step."""

    def __init__(
        self, state_of: Callable[[Hashable], tuple[Grammar | None, int]], drafter: Any = None
    ):
        """state_of: row -> its grammar and state."""
        self.state_of, self.drafter = state_of, drafter
        self.forced: dict[Hashable, list[int]] = {}  # of the rows of this step
        self.limits: dict[Hashable, int] = {}  # the other policy's choice
        self.is_free = getattr(drafter, "is_free", False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("drafter"), name)

    def propose_batch(
        self, rows: Sequence[Hashable], contexts: Sequence[list[int]], ks: Sequence[int]
    ) -> list[tuple[list[int], Tensor | None]]:
        """Forced tokens are deterministic drafts, of probability 1."""
        found = [(self.forced[row][:k], None) for row, k in zip(rows, ks)]
        limits = [min(k, max(self.limits[row], self.is_free)) for row, k in zip(rows, ks)]
        others = [i for i, (ids, _) in enumerate(found) if not ids and limits[i]]
        if others:
            each = ([x[i] for i in others] for x in (rows, contexts, limits))
            one_by_one = lambda _, contexts, ks: map(self.drafter, contexts, ks)
            drafts = getattr(self.drafter, "propose_batch", one_by_one)(*each)
            for i, draft in zip(others, drafts):
                found[i] = draft
        return found


class ForcedPolicy:
    """The number of drafts of each row of a ForcedTokens. The other policy observes other drafts
    only, since forced ones are always accepted."""

    def __init__(self, drafter: ForcedTokens, policy: Any = None):
        self.drafter, self.policy = drafter, policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("policy"), name)

    def choose(self, rows: Sequence[Hashable]) -> list[int]:
        d, states = self.drafter, map(self.drafter.state_of, rows)
        d.forced = {
            row: grammar.forced_tokens(state, MAX_FORCED_TOKENS) if grammar is not None else []
            for row, (grammar, state) in zip(rows, states)
        }
        limits = self.policy.choose(rows) if self.policy is not None else [0] * len(rows)
        d.limits = dict(zip(rows, limits))
        return [len(d.forced[row]) or d.limits[row] for row in rows]

    def observe(self, rows: Any, proposed: Any, accepted: Any, *timings: Any) -> None:
        if self.policy is not None:
            each = [x for x in zip(rows, proposed, accepted) if not self.drafter.forced[x[0]]]
            self.policy.observe(*([x[i] for x in each] for i in range(3)), *timings)


# --------------------------------------------------------------------------------------------------
# Self-check and benchmark
# --------------------------------------------------------------------------------------------------


def main() -> None:
    """Random texts of a pattern match it; milliseconds per mask of a state."""
    import time

    pattern = r'\{"name":"(?:[^"\\]|\\["\\])*","age":-?[0-9]{1,3}\}'
    print(f"{'tokens':>8}{'ms per mask, mean':>20}{'largest':>10}")
    for size in (256, 4096, 150_000):
        rng = np.random.default_rng(0)
        longer = rng.integers(32, 127, (size, 5)).astype(np.uint8)
        tokens = [*(bytes([i]) for i in range(256)), *(bytes(t[: 2 + t[0] % 4]) for t in longer)]
        encode = lambda text: list(text.encode())
        grammar = Grammar(Vocabulary([*tokens[: size - 1], None], [size - 1], encode), pattern)
        state, text, times = grammar.start, b"", []
        while state >= 0:
            start = time.perf_counter()
            ids = grammar._mask_and_forced(state)[0].nonzero()[:, 0]
            times.append(1e3 * (time.perf_counter() - start))
            id = int(rng.choice(ids[:64]))  # short ones, so that the text ends
            state, text = grammar.advance(state, id), text + grammar.vocabulary.tokens[id]
        assert re.fullmatch(pattern, text.decode()), text
        print(f"{size:>8}{sum(times) / len(times):>20.3f}{max(times):>10.3f}")


if __name__ == "__main__":
    main()
