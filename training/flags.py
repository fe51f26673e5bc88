"""A dataclass as a command line: its fields are the flags.

    @dataclass
    class Config(Settings):
        steps: int = flag(500, "total number of steps", "positive")
        tp: int = flag(1, "tensor-parallel degree", "positive", metavar="N")
        ep_chunks: int = rare(1, "chunks of tokens that overlap", "positive")

    config = parse(Config, argv, prog="train.py", description="...", groups={"steps": "run"})
    check_requires(config, [("ep_chunks", "ep")])
    check_excludes(config, [("tp", "fp8 qat", "scales are of full matrices")])

Fields made by flag() have a flag of their own, those made by rare() are set by --set NAME=VALUE. A
condition is the name of a field, fulfilled by any value but None, 0, False and the default, or
"NAME=A|B", fulfilled by these values.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar


def parse_path(text: str) -> Path:
    """A path; not "", which Path takes for the current folder. ArgumentTypeError."""
    if not text:
        raise argparse.ArgumentTypeError("an empty path; give a file or a folder")
    return Path(text)


# by the first word of annotations
TYPES = {"int": int, "float": float, "str": str, "Path": parse_path}


def flag(default: Any, text: str, limit: str = "", **options: Any) -> Any:
    """A field with a flag. limit: "positive" or "N or more"; options: as of argparse's
    add_argument, and positional=True for an argument without a flag."""
    return field(default=default, metadata=dict(help=text, limit=limit, rare=False, **options))


def rare(default: Any, text: str, limit: str = "", **options: Any) -> Any:
    """A field that is set by --set NAME=VALUE."""
    return field(default=default, metadata=dict(help=text, limit=limit, rare=True, **options))


def parse_bytes(text: str) -> int:
    """The bytes of 8e9, 500M or 12G. ValueError if it is none of these."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    digits, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1)
    try:
        return int(float(digits) * unit)
    except OverflowError:
        raise ValueError(f"{text} bytes") from None


def out_of_memory(e: Exception) -> str | None:
    """The first line of an error that is a lack of memory, or a tensor too large to count; None for
    any other: CUDA's "illegal memory access" is a bug, and a failed compiler prints any source."""
    texts = r"out of memory|(not enough|allocate) memory|overflow"
    first, *_ = str(e).splitlines() or ["allocation failed"]
    return first if isinstance(e, MemoryError) or re.search(texts, first) else None


@dataclass
class Settings:
    """The base of a config. given: the names of the fields that the command line sets."""

    given: frozenset[str] = frozenset()

    @classmethod
    def flags(cls) -> dict[str, Any]:
        return {f.name: f for f in fields(cls) if f.metadata}

    def is_on(self, condition: str) -> bool:
        name, _, values = condition.partition("=")
        value = getattr(self, name)
        if values:
            return str(value) in values.split("|")
        is_set = name in self.given or value not in (None, False)  # 0 == False
        return is_set and value != self.flags()[name].default

    def shown(self, condition: str) -> str:
        """A condition as on the command line: --zero 1 or 2, --set ep_chunks; of a fulfilled one
        only the value that fulfills it."""
        name, _, values = condition.partition("=")
        is_rare = self.flags()[name].metadata["rare"]
        text = f"--set {name}" if is_rare else _flag(name)
        text = f"a {name}" if self.flags()[name].metadata.get("positional") else text
        if values and self.is_on(condition):
            values = str(getattr(self, name))
        joint = "=" if is_rare else " "
        return f"{text}{joint}{values.replace('|', ' or ').lower()}" if values else text


Config = TypeVar("Config", bound=Settings)


def parse(
    cls: type[Config], argv: Sequence[str], prog: str, description: str, groups: Mapping[str, str]
) -> Config:
    """The config of a command line. groups: {the first field of a group of --help: its title}.
    ValueError for a --set that does not exist or cannot be read; argparse exits for flags."""
    known = cls.flags()
    parser = group = argparse.ArgumentParser(
        prog=prog, description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["settings of --set NAME=VALUE:", *map(_set_help, known.values())]),
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", metavar="NAME=VALUE", help="a rarer setting, listed at the end"
    )
    for name, f in known.items():
        group = parser.add_argument_group(groups[name]) if name in groups else group
        options = {k: x for k, x in f.metadata.items() if k not in ("limit", "rare")}
        if f.default is False:
            options["action"] = "store_true"
        else:
            options.setdefault("type", TYPES.get(f.type.split()[0], str))
        options["help"] += f" ({f.default})" if f.default not in (None, False, ()) else ""
        if not f.metadata["rare"]:
            group.add_argument(name if options.pop("positional", False) else _flag(name), **options)
    values = vars(parser.parse_args(argv))
    for name, _, value in (text.partition("=") for text in values.pop("set", ())):
        if name not in known or not known[name].metadata["rare"]:
            raise ValueError(f"--set {name}: no such setting; see python {prog} --help")
        values[name] = _convert(known[name], value)
    return cls(**values, given=frozenset(values))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _set_help(f: Any) -> str:
    if not f.metadata["rare"]:
        return ""
    default = "" if f.default in (None, "") else f" ({str(f.default).lower()})"
    return f"  {f.name:24}{f.metadata['help']}{default}".replace("%%", "%")


def _convert(f: Any, text: str) -> Any:
    """The value of --set NAME=TEXT."""
    choices = f.metadata.get("choices", ("true", "false") if f.type == "bool" else (text,))
    if text not in choices:
        raise ValueError(f"--set {f.name}={text}: choose from {', '.join(choices)}")
    try:
        return text == "true" if f.type == "bool" else TYPES[f.type.split()[0]](text)
    except argparse.ArgumentTypeError as e:
        raise ValueError(f"--set {f.name}: {e}") from None
    except ValueError:
        raise ValueError(f"--set {f.name}={text}: not a number") from None


def check_limits(config: Settings) -> None:
    """ValueError for a number out of range."""
    for name, f in config.flags().items():
        value, limit = getattr(config, name), f.metadata["limit"]
        if limit and value is not None:
            low = math.ulp(0.0) if limit == "positive" else int(limit.split()[0])
            if not low <= value < math.inf:
                raise ValueError(f"{config.shown(name)} must be {limit}, not {value}")


def check_positive(args: Any, *names: str) -> None:
    """ValueError for a number of an argparse.Namespace that is given and not above 0."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give a number above 0")


def check_requires(config: Settings, table: Sequence[tuple[str, str]]) -> None:
    """table: (condition, conditions of which it needs one). ValueError if none is fulfilled; a
    field that is given counts, whatever its value."""
    for name, needed in table:
        fulfilled = any(map(config.is_on, needed.split()))
        if (name in config.given or config.is_on(name)) and not fulfilled:
            needed = " or ".join(map(config.shown, needed.split()))
            raise ValueError(f"{config.shown(name)} requires {needed}")


def check_excludes(config: Settings, table: Sequence[tuple[str, str, str]]) -> None:
    """table: (condition, conditions that it excludes, why). ValueError for two such."""
    for name, others, why in table:
        for other in others.split() if config.is_on(name) else ():
            if config.is_on(other):
                pair = f"{config.shown(name)} cannot be combined with {config.shown(other)}"
                raise ValueError(f"{pair}: {why}")
