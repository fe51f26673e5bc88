"""The prompt of generate.py: an argument, stdin, a chat message or random tokens."""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from generation.config import GenerateConfig
from huggingface.fine_tune import TextFormat, load_fine_tune_format, load_text_format
from huggingface.tokenizer import Tokenizer, check_utf8
from model import ModelConfig

DEFAULT_PROMPT = "class Stack:\n    def __init__(self):\n"


def prompt_text(args: GenerateConfig) -> str:
    """The prompt: the argument, stdin if that is a file or a pipe, or the default. ValueError if it
    is empty or not UTF-8."""
    text, piped = args.prompt, stdin_is(stat.S_ISFIFO)
    if text == "-" or (text is None and (piped or stdin_is(stat.S_ISREG))):
        text = read_stdin()
        if piped and not text and args.prompt is None:
            # schedulers and test runners start programs with an empty pipe
            print("nothing on stdin: the default prompt is continued", file=sys.stderr)
            text = DEFAULT_PROMPT
    elif text is None:
        text = DEFAULT_PROMPT
    if not text:
        raise ValueError("the prompt is empty; give some text, as an argument or on stdin")
    return text


def read_stdin() -> str:
    """The text on stdin, with newlines as \n. ValueError names a byte that is not UTF-8."""
    if not hasattr(sys.stdin, "buffer"):  # a StringIO
        return sys.stdin.read()
    text = sys.stdin.buffer.read().decode(errors="surrogateescape")
    return check_utf8(text, "the prompt").replace("\r\n", "\n").replace("\r", "\n")


def stdin_is(kind: Callable[[int], bool]) -> bool:
    """Whether stdin's mode satisfies `kind`, such as stat.S_ISFIFO."""
    try:
        return kind(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):  # there is no stdin
        return False


def text_format(args: GenerateConfig, config: ModelConfig, tokenizer: Tokenizer) -> TextFormat:
    """Chat template and EOS ids of --checkpoint, or of --adapter. ValueError names the flag."""
    if args.dummy is not None:
        return TextFormat()
    format = load_text_format(args.checkpoint, config.eos_ids, tokenizer)
    if args.adapter is None:
        return format
    try:
        return load_fine_tune_format(args.checkpoint, format, tokenizer, args.adapter)
    except ValueError as e:
        raise ValueError(f"--adapter {args.adapter}: {e}") from None


def prompt_ids(
    args: GenerateConfig, text: str, tokenizer: Tokenizer, config: ModelConfig, format: TextFormat,
    limited: bool = True,
) -> list[int]:  # fmt: skip
    """The prompt's token ids. ValueError if there are none; limited: or if it has more bytes than
    the context can hold."""
    if args.prompt_tokens is not None:
        check_fits(args.prompt_tokens, config.context)
        rng = torch.Generator().manual_seed(0)
        return torch.randint(config.vocab_size, (args.prompt_tokens,), generator=rng).tolist()
    if args.chat:
        if format.template is None:
            raise ValueError(f"--chat: {args.checkpoint} has no chat template; remove --chat")
        message = {"role": "user", "content": text}
        text = format.template.prompt([message], args.system_prompt)
    try:
        max_bytes = config.context * tokenizer.max_token_bytes if limited else None
        ids = tokenizer.encode_prompt(text, max_bytes, bos=not args.chat)
    except ValueError as e:
        raise ValueError(f"the prompt {e}") from None
    if not ids:
        raise ValueError("the prompt has no tokens; give some text")
    return ids


def check_fits(n_prompt: int, context: int) -> None:
    """ValueError if the prompt leaves no room in the model's context."""
    if n_prompt >= context:
        raise ValueError(
            f"the prompt has {n_prompt} tokens, but the model's context (max_position_embeddings "
            f"in config.json) is {context}; shorten it"
        )


def fit_to_context(args: GenerateConfig, n_prompt: int, context: int) -> int:
    """--max-new-tokens, lowered with a message to what the model's context leaves. ValueError if
    that is nothing."""
    check_fits(n_prompt, context)
    max_new = min(args.max_new_tokens, context - n_prompt)
    if max_new < args.max_new_tokens:
        print(
            f"generate.py: --max-new-tokens {args.max_new_tokens} lowered to {max_new} to fit the "
            f"model's context of {context}",
            file=sys.stderr,
        )
    return max_new


def read_text(path: Path, flag: str = "--perplexity") -> str:
    """A UTF-8 text, without newline translation. ValueError names the flag."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{flag} {path}: not UTF-8 text ({e.reason})") from None
    except OSError as e:
        raise ValueError(f"{flag} {path}: {e.strerror}; give a text file") from None
