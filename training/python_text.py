"""Python source as training text: the standard library and the packages of requirements.txt.

    python -m training.python_text runs/text     # 40 s; the train.py command: checkpoints/README.md

stdlib.jsonl has the documents of train.py without --data, each in the same split. packages.jsonl
has training documents only: the *.py files of PACKAGES as installed, shuffled, without duplicates,
tables (mean line longer than 120 characters) and copies of validation documents (files of which
more than 20% of the lines longer than 30 characters occur there, such as vendored backports).

Prints version and license of every package, vendored ones included; then, for each validation
document, the share of its 50-character substrings that occurs in the training text of the standard
library, and in all training text.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    raise SystemExit("run: python -m training.python_text OUT")

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from huggingface.weights import write_atomically
from training.data import is_validation, stream_documents

PACKAGES = """torch torchgen functorch triton sympy networkx numpy jinja2 markupsafe mpmath fsspec
    filelock sentencepiece safetensors setuptools tqdm tokenizers typing_extensions huggingface_hub
"""  # import names


def package_files(name: str, pattern: str = "*.py") -> list[Path]:
    """The files of an installed package, or the one of a module. ValueError if it is missing."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"package {name} is not installed; run: pip install -r requirements.txt")
    path = Path(spec.origin)
    if path.name != "__init__.py":
        return [path] if path.match(pattern) else []
    return sorted(path.parent.rglob(pattern))


def package_documents(training: Sequence[str], validation: Sequence[str]) -> Iterator[str]:
    """The files of PACKAGES that are neither in `training` nor copies of `validation`."""
    long_lines = lambda text: [s for line in text.splitlines() if len(s := line.strip()) > 30]
    held_out, seen = {line for text in validation for line in long_lines(text)}, {*training}
    for name in PACKAGES.split():
        for path in package_files(name):
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            lines, n_lines = long_lines(text), text.count("\n") + 1
            copied = sum(line in held_out for line in lines) > 0.2 * len(lines)
            is_table = len(text) - n_lines + 1 > 120 * n_lines
            if not (copied or is_table or len(text) < 200 or "\0" in text or text in seen):
                seen.add(text)
                yield text


def write_jsonl(path: Path, training: Sequence[str], validation: Sequence[str]) -> None:
    """JSONL with "text" that is read back with the same split: data.is_validation of the line
    number. Lines of a split that has no more documents stay blank; readers skip them."""
    lines, texts = [], {False: [*training][::-1], True: [*validation][::-1]}
    while texts[False] or texts[True]:
        split = texts[is_validation(str(len(lines) + 1))]
        lines.append(json.dumps({"text": split.pop()}) if split else "")
    write_atomically(path, lambda tmp: tmp.write_text("\n".join([*lines, ""]), encoding="utf-8"))


def overlap(validation: Sequence[str], training: Iterable[str], n: int = 50) -> list[float]:
    """For each validation text, the share of its n-character substrings found in `training`."""
    substrings = lambda text: (text[i : i + n] for i in range(len(text) - n + 1))
    wanted, found = {s for text in validation for s in substrings(text)}, set()
    for text in training:
        found |= wanted.intersection(substrings(text))
    share = lambda text: sum(s in found for s in substrings(text)) / max(len(text) - n + 1, 1)
    return [share(text) for text in validation]


def licenses(name: str) -> list[str]:
    """`package version (license)` of an import name and of the packages vendored in it."""
    infos = package_files(name, "*.dist-info/METADATA")
    vendored = sorted({str(path.parents[1]) for path in infos})
    owner = metadata.packages_distributions()[name][0]
    described = []
    for package in [metadata.distribution(owner), *metadata.distributions(path=vendored)]:
        about = package.metadata
        classified = [c for c in about.get_all("Classifier", ()) if c.startswith("License ::")]
        terms = about["License-Expression"] or about["License"] or "".join(classified[:1])
        terms = terms.strip().split("\n")[0].rpartition(":: ")[2] or "no license given"
        described.append(f"{about['Name']} {package.version} ({terms})")
    return described


def prepare(out: Path) -> None:
    """Write the two files and print licenses, sizes and overlap."""
    stdlib = [*stream_documents(None)]
    training = [text for name, text in stdlib if not is_validation(name)]
    held_out = {name: text for name, text in stdlib if is_validation(name)}
    validation = [*held_out.values()]
    documents = [*package_documents(training, validation)]
    random.Random(0).shuffle(documents)
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "stdlib.jsonl", training, validation)
    write_jsonl(out / "packages.jsonl", documents, [])
    print(*dict.fromkeys(line for name in PACKAGES.split() for line in licenses(name)), sep="\n")
    sources = {"stdlib": training, "packages": documents, "validation": validation}
    print(*(f"{name}: {sum(map(len, texts)):,} characters" for name, texts in sources.items()))
    shares = [overlap(validation, texts) for texts in (training, [*training, *documents])]
    for name, alone, both in zip(held_out, *shares, strict=True):
        print(f"{alone:7.1%}{both:7.1%}  {name}")


def main(argv: Sequence[str]) -> int:
    """Exit code 2 and one line if a package is missing or a file cannot be written."""
    parser = argparse.ArgumentParser("python -m training.python_text", description=__doc__)
    parser.add_argument("out", type=Path, help="folder for stdlib.jsonl and packages.jsonl")
    try:
        prepare(parser.parse_args(argv).out)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
