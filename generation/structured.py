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
(a|b)*a(a|b){30} is, so a process with bounded memory compiles it (50 ms) and failures are kept;
Unicode classes are large (\\w{0,100} has over 20,000 states); --speculate tree masks, but does not
jump, since its step has one tree for all rows.

Hook: SamplingParams.grammar, which generation/sampling.py masks with, and the drafters of
speculative.py. Equivalence (test_all.py): allowed tokens == those of a search over all texts of
the pattern; texts match, also sampled, batched, preempted and speculative; with jumps == without,
in fewer forward passes. Needs: torch, numpy; outlines-core (the Rust regex automaton).
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import inspect
import math
import pickle
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

MAX_STATES = 20_000  # of a DFA
MAX_ATOMS = 250_000  # characters and classes of a pattern, each as often as it is repeated
MAX_MEMORY = 2**26  # bytes of the process that compiles it; 20,000 states take half of it
MAX_SECONDS = 5  # of CPU, should neither end it; 20,000 states take 0.6
MAX_DFAS, MAX_ERRORS = 16, 4096  # that are kept: a DFA has up to 20 MB
LOOKAHEAD = 256  # bytes of a forced chain that are read, more than any token has
MAX_FORCED_TOKENS = 32  # drafts per step: forced tokens must run anyway, so many at once
MASKS_KEPT = 256  # of a Grammar, least recently used first out: 40 MB for 150k tokens

# --------------------------------------------------------------------------------------------------
# Patterns
# --------------------------------------------------------------------------------------------------

# Before and after what outlines-core compiles, and in no text. In front, since it determinizes the
# unanchored search too, which is exponential where a text's start can occur again within a repeat;
# behind, since it finds leftmost matches, which never go on after an accepting state (a|ab: a).
SENTINEL = "\0"
DFA = tuple[np.ndarray, np.ndarray]  # transitions and accepting states, see compile_dfa
_COMPILED: OrderedDict[str, DFA] = OrderedDict()
_FAILED: OrderedDict[bytes, str] = OrderedDict()  # digest of a pattern -> why
_CACHE_LOCK, _ONE_AT_A_TIME = threading.Lock(), threading.Lock()


# Atoms of Rust's syntax; a class may hold others. Text that no repeat follows is one token.
CLASS = r"\[\^?\]?(?:\\.|[^\]\\])*\]"
NESTED = CLASS.replace(r"[^\]\\]", rf"{CLASS}|[^\]\\\[]")
TOKEN = re.compile(
    rf"""(?P<text>[\w ,:;"'<>=-]{{2,}}(?![*+?{{])) | (?P<class>{NESTED})
    | (?P<open>\((?:\?(?:P?<\w+>|[a-zA-Z-]*:?))?) | (?P<either>\|) | (?P<close>\))
    | (?P<repeat>(?:[*+?]|\{{(?P<low>\d*)(?:(?P<comma>,)(?P<high>\d*))?\}})\??)
    | (?P<other>\\[pP]\{{[^}}]*\}}|\\.|.)""",
    re.DOTALL | re.VERBOSE,
)


def without_anchors(pattern: str) -> str:
    """A pattern less ^ and $ at its ends, which are redundant where it must match a whole text."""
    return re.sub(r"(?<!\\)((?:\\\\)*)\$$", r"\1", pattern.removeprefix("^"))


def without_sentinel(pattern: str) -> str:
    """A pattern whose . and negated classes leave SENTINEL out; as it is, and so perhaps slow to
    compile, if flags change what its characters mean."""
    if re.search(r"\(\?[a-zA-Z]*[-suxU]", pattern):
        return pattern

    def leave_out(token: re.Match[str]) -> str:
        kind, text = token.lastgroup, token.group()
        if kind == "other" and text == ".":
            return r"[^\n\x00]"
        is_class = kind == "class" and ("^" in text or "\\" in text)
        is_class = is_class or text[:2] in (r"\D", r"\W", r"\S", r"\p", r"\P")
        return rf"[{text}&&[^\x00]]" if is_class and r"\x00" not in text else text

    return TOKEN.sub(leave_out, pattern)


class _Size(NamedTuple):
    """Atoms of a pattern as often as they are repeated; characters of its shortest and longest
    text."""

    atoms: float = 0
    shortest: float = 0
    longest: float = 0

    def then(self, other: _Size) -> _Size:
        return _Size(*(a + b for a, b in zip(self, other)))

    def either(self, other: _Size | None) -> _Size:
        if other is None:
            return self
        atoms, shortest = self.atoms + other.atoms, min(self.shortest, other.shortest)
        return _Size(atoms, shortest, max(self.longest, other.longest))

    def times(self, low: float, high: float) -> _Size:
        longest = self.longest * high if self.longest else 0
        copies = max(1, low if high == math.inf else high)
        return _Size(self.atoms * copies, self.shortest * low if low else 0, longest)


def _repeats(token: re.Match[str]) -> tuple[float, float]:
    """The limits of a quantifier."""
    low, comma, high = token["low"], token["comma"], token["high"]
    if low is None:
        return {"*": (0, math.inf), "+": (1, math.inf), "?": (0, 1)}[token.group()[0]]
    number = lambda digits: float(digits[:300] or 0)
    return number(low), number(high) if high else math.inf if comma else number(low)


def check_size(pattern: str) -> None:
    """ValueError for a pattern of over MAX_ATOMS, or whose shortest text or the longest, if there
    is one, has over MAX_STATES characters: each has a state of its own."""
    outer, done, sequence, last = [], None, _Size(), _Size()  # last: what a repeat would repeat
    for token in TOKEN.finditer(pattern):
        kind, text = token.lastgroup, token.group()
        if kind == "repeat":
            last = last.times(*_repeats(token))
            continue
        sequence, last = sequence.then(last), _Size()
        if kind == "open":
            outer.append((done, sequence))
            done, sequence = None, _Size()
        elif kind == "either":
            done, sequence = sequence.either(done), _Size()
        elif kind == "close":
            if not outer:
                raise ValueError("cannot be compiled: it has an unopened group")
            last = sequence.either(done)
            done, sequence = outer.pop()
        else:
            last = _Size(*[len(text) if kind == "text" else 1] * 3)
    size = sequence.then(last).either(done)
    if max(size.atoms / MAX_ATOMS, size.shortest / MAX_STATES) > 1 or (
        MAX_STATES < size.longest < math.inf
    ):
        raise ValueError(TOO_LARGE)


def compile_dfa(pattern: str) -> DFA:
    """A regular expression that must match a whole text -> its DFA over UTF-8: transitions (states,
    256), -1 for none, from state 0; accepting (states,) bool. An accepting state can be reached
    from each. The syntax is that of Rust's regex, which Python's mostly is; ^ and $ at the ends are
    redundant; . and negated classes leave out U+0000. ValueError, which the caller puts the
    setting's name before: it is invalid or too large."""
    if (known := known_dfa(pattern)) is not None:
        return known
    with _ONE_AT_A_TIME:
        if (known := known_dfa(pattern)) is not None:  # by another thread meanwhile
            return known
        command, text = _command(pattern)
        done = subprocess.run(command, input=text, capture_output=True)
        return _remember(pattern, done.returncode, done.stdout)


async def compile_dfa_async(pattern: str) -> None:
    """As compile_dfa, which has the DFA after this; a cancelled task ends the process."""
    if known_dfa(pattern) is not None:
        return
    command, text = await asyncio.to_thread(_command, pattern)
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=null)
    try:
        stdout, _ = await process.communicate(text)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    await asyncio.to_thread(_remember, pattern, process.returncode, stdout)


def known_dfa(pattern: str) -> DFA | None:
    """What was compiled before, None if that is new or long ago. ValueError as it was."""
    with _CACHE_LOCK:
        if (why := _FAILED.get(_digest(pattern))) is not None:
            raise ValueError(why)
        if (dfa := _COMPILED.get(pattern)) is not None:
            _COMPILED.move_to_end(pattern)
        return dfa


def _remember(pattern: str, code: int | None, stdout: bytes) -> DFA:
    """The DFA that a process returned, or ValueError; known_dfa has either from now on."""
    result = pickle.loads(stdout) if code == 0 else TOO_LARGE
    dfa = _table(*result) if isinstance(result, tuple) else None
    with _CACHE_LOCK:
        if dfa is None:
            _FAILED[_digest(pattern)] = result
        else:
            _COMPILED[pattern] = dfa
        for kept, limit in ((_COMPILED, MAX_DFAS), (_FAILED, MAX_ERRORS)):
            while len(kept) > limit:
                kept.popitem(last=False)
    if dfa is None:
        raise ValueError(result)
    return dfa


TOO_LARGE = f"is too large: over {MAX_STATES} states; repeat less"


def _digest(pattern: str) -> bytes:
    return hashlib.sha256(pattern.encode(errors="surrogatepass")).digest()


def _command(pattern: str) -> tuple[list[str], bytes]:
    """The process that compiles a pattern, and its input."""
    if find_spec("outlines_core") is None:
        raise ValueError("requires outlines-core: pip install outlines-core==0.2.14")
    if any("\ud800" <= c <= "\udfff" for c in pattern):
        raise ValueError("is not valid Unicode: it has half of a surrogate pair; remove it")
    pattern = without_sentinel(without_anchors(pattern))
    check_size(pattern)
    limits = f"{MAX_STATES}, {MAX_SECONDS}, {MAX_MEMORY}, {TOO_LARGE!r}"
    code = f"{inspect.getsource(_index)}\n_index({limits})"
    text = f"{SENTINEL}(?:{pattern}){SENTINEL}".encode()
    return [sys.executable, "-c", code], text


def _index(max_states: int, seconds: int, memory: int, too_large: str) -> None:
    """A process of its own, which ends when it exceeds a limit: a regular expression -> transitions
    (states, 256) int32, from state 0, the number of states for none; accepting (states,) bool; both
    as bytes. Or why it is invalid."""
    import array
    import pickle
    import resource
    import sys

    import outlines_core

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    none = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        bytes_ = outlines_core.Vocabulary(256, {bytes([i]): [i] for i in range(256)})
        pattern = sys.stdin.buffer.read().decode()
        resource.setrlimit(resource.RLIMIT_DATA, (memory, none[1]))
        index = outlines_core.Index(pattern, bytes_)
        resource.setrlimit(resource.RLIMIT_DATA, none)
        final, edges = index.get_final_states(), index.get_transitions()
        first = edges[index.get_initial_state()][0]  # after the sentinel
        states = [first, *sorted(edges.keys() - final - {first, index.get_initial_state()})]
        if len(states) > max_states:
            result = too_large
        else:
            number = {state: i for i, state in enumerate(states)}
            table = array.array("i", [len(states)]) * (256 * len(states))
            for i, state in enumerate(states):
                for byte, to in edges[state].items():
                    if byte < 256 and to in number:  # 256 is outlines-core's EOS
                        table[256 * i + byte] = number[to]
            accepting = bytes(edges[state].get(0) in final for state in states)
            result = table.tobytes(), accepting
    except (KeyError, UnicodeDecodeError, ValueError) as e:
        why = " ".join(f"{type(e).__name__} {e}".split())[:150]
        result = f"cannot be compiled, or matches nothing ({why})"
    pickle.dump(result, sys.stdout.buffer)


def _table(transitions: bytes, accepting: bytes) -> DFA:
    """What _index found -> transitions and accepting states, with a last one of no transitions."""
    n = len(accepting)
    table = np.frombuffer(transitions, np.int32).reshape(n, 256)
    table = np.concatenate([table, np.full((1, 256), n, np.int32)])
    return _prune(table, np.frombuffer(accepting + b"\0", bool))


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
        self.runner = getattr(drafter, "runner", None)

    def observe(self, row: Hashable, start: int, hidden: Tensor) -> None:
        """Pass hidden states on."""
        if hasattr(self.drafter, "observe"):
            self.drafter.observe(row, start, hidden)

    def forget(self, row: Hashable) -> None:
        """Drop a row's state."""
        if hasattr(self.drafter, "forget"):
            self.drafter.forget(row)

    def draft_ahead(self, *args: Any) -> None:
        """Of the other drafter, which has it where it is called."""
        self.drafter.draft_ahead(*args)

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

    def forget(self, row: Hashable) -> None:
        """Drop a row's state."""
        if hasattr(self.policy, "forget"):
            self.policy.forget(row)

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
