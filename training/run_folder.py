"""The folder of a run, OUT: its one writer, what it takes from --init, and what it was made from.

Four rules keep a folder from mixing two runs:

- One process writes a folder at a time (writer_lock.py). Readers (--export DIR, --init of another
  run) take no lock and write nothing into it.
- A start that is refused leaves OUT as it was, or not there (`starting`); only data/, in which
  documents that were tokenized need not be tokenized again, is kept.
- A start takes all of CHECKPOINT_FILES from --init, or none: what an earlier start has left is
  removed, so that no tokenizer, template or EOS of another model is used (`copy_files`).
- Inputs are known by their content, not by their path. `inputs.json` has the sha256 of what --init,
  --model, --data and --reward refer to, in OUT/NAME of one of --lora-jobs its data and adapter: a
  resumed run may be given them at another place. It also has those of the CHECKPOINT_FILES and
  token files in OUT, in which a changed byte would train on other text (`verify_files`).

Cost: each input is read once more when a run starts, some seconds per 10 GB, and the base model of
adapters at each resume. Part of train.py.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of train.py; run: python train.py --help")

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface.weights import write_atomically
from model import CONFIGS
from training.config import DRAFT_HEAD, TrainConfig
from training.data import source_files
from training.shards import parse_sources
from training.writer_lock import LOCK

INPUTS = "inputs.json"
TOKENIZERS = "tokenizer.model", "tokenizer.json"
CHECKPOINT_FILES = (  # what a checkpoint folder has beside config.json and weights
    *TOKENIZERS, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "generation_config.json", "chat_template.jinja",
)  # fmt: skip
MORE_TEMPLATES = "additional_chat_templates/*.jinja"
TOKEN_FILES = "train.tokens", "val.tokens"
ADAPTER_FILES = "adapter_config.json", "adapter_model.safetensors"
ANOTHER_RUN = "or start a new run in another --out"
BEFORE = ".before"  # in OUT while a run starts: what it replaces


# --------------------------------------------------------------------------------------------------
# Files of a checkpoint folder
# --------------------------------------------------------------------------------------------------


def checkpoint_files(folder: Path) -> list[Path]:
    """Those of CHECKPOINT_FILES that the folder has, and its additional templates. A broken link is
    among them: reading it is an error, not a file less."""
    found = [folder / name for name in CHECKPOINT_FILES if os.path.lexists(folder / name)]
    return found + sorted(folder.glob(MORE_TEMPLATES))


def copy_files(source: Path | None, to: Path) -> None:
    """Replace the checkpoint files of `to` by those of `source`; None: only remove them. OSError
    names the file."""
    for old in checkpoint_files(to):
        old.unlink()
    for path in checkpoint_files(source) if source else ():
        content, target = path.read_bytes(), to / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, lambda tmp, content=content: tmp.write_bytes(content))


def check_new_folder(flag: str, to: Path) -> None:
    """ValueError if a folder that a flag names holds something already."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ValueError(f"{flag} {to}: exists and is not an empty folder; name another")


def make_folder(flag: str, folder: Path) -> None:
    """Make a folder that a flag names. ValueError if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise ValueError(f"{flag} {folder}: {e.strerror}; give a folder to write") from None


def check_output_dir(out: Path, saved: tuple[Path, int, Any] | None) -> None:
    """ValueError if OUT holds what a new run would overwrite. saved: the checkpoint in OUT."""
    if saved is not None:
        raise ValueError(
            f"--out {out}: holds a run of {saved[1]} steps; continue it with --resume, or choose "
            "another folder"
        )
    existing = {path.name for path in out.glob("*.safetensors")}
    if existing:
        what = "a draft head" if existing == {DRAFT_HEAD} else "a model but no run to resume"
        raise ValueError(f"--out {out}: holds {what}; choose another folder")
    files = [out / name for name in ("config.json", "metrics.jsonl", *TOKEN_FILES)]
    files = [path for path in (*files, *checkpoint_files(out)) if os.path.lexists(path)]
    started = (out / INPUTS).exists() or (out / BEFORE).exists()
    if files and not started:
        raise ValueError(f"--out {out}: holds {files[0].name} of no run; choose another folder")


def check_apart(config: TrainConfig) -> None:
    """ValueError if OUT lies in a folder of --data, or that in OUT's for shards: a resumed run
    would read files of its own as text."""
    out, is_text = config.out.resolve(), config.task in ("text", "draft-head")
    for source in parse_sources(config.data or ()) if is_text else ():  # others are JSONL files
        folder = Path(source.path).resolve()
        inside = out.is_relative_to(folder) or folder.is_relative_to(out / "data")
        if folder.is_dir() and inside:
            raise ValueError(
                f"--out {config.out}: its files would be among those of --data {source.path}; "
                "choose another folder"
            )


# --------------------------------------------------------------------------------------------------
# The start of a run
# --------------------------------------------------------------------------------------------------


@contextmanager
def starting(out: Path, made: Iterable[Path]) -> Iterator[None]:
    """Undo a start that raises. made: OUT and its parents, as far as the start has made them."""
    try:
        yield
    except BaseException:
        undo_start(out)
        if made:
            (out / LOCK).unlink(missing_ok=True)
        for folder in made:
            with suppress(OSError):  # data/ is kept
                folder.rmdir()
        raise
    for before in _set_aside(out):
        shutil.rmtree(before)


def set_aside(folder: Path) -> None:
    """Move the files that a start replaces to where undo_start finds them."""
    undo_start(folder)  # one that was killed
    (folder / BEFORE).mkdir()
    _move_files(folder, folder / BEFORE)


def undo_start(out: Path) -> None:
    """The files of OUT, and of the folders of --lora-jobs in it, as before set_aside."""
    for before in _set_aside(out):
        folder = before.parent
        for path in _start_files(folder):
            path.unlink()
        with suppress(OSError):
            (folder / MORE_TEMPLATES).parent.rmdir()
        _move_files(before, folder)
        shutil.rmtree(before)
        if folder != out:
            with suppress(OSError):
                folder.rmdir()


def _set_aside(out: Path) -> list[Path]:
    return [*out.glob(BEFORE), *out.glob(f"*/{BEFORE}")]


def _start_files(folder: Path) -> list[Path]:
    own = [folder / name for name in (INPUTS, *TOKEN_FILES)]
    return checkpoint_files(folder) + [path for path in own if os.path.lexists(path)]


def _move_files(source: Path, to: Path) -> None:
    for path in _start_files(source):
        target = to / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)


# --------------------------------------------------------------------------------------------------
# What a run was made from
# --------------------------------------------------------------------------------------------------


def file_hash(path: Path) -> str:
    """The first 16 digits of a file's sha256."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()[:16]


def folder_hash(files: Iterable[tuple[str, Path]]) -> str:
    """A hash of the names and contents of (name, path)."""
    text = "".join(f"{name}\n{file_hash(path)}\n" for name, path in files)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def input_hash(config: TrainConfig, name: str) -> Any:
    """The content that a setting refers to, wherever it lies: data (with weights), init, model or
    reward. ValueError if it does not exist."""
    value = getattr(config, name)
    if name == "data":
        sources = parse_sources(value) if value else [None]
        weights = [str(s.weight) if s else "1" for s in sources]
        files = [source_files(s.path if s else None) for s in sources]
        return [[weight, folder_hash(part)] for weight, part in zip(weights, files)]
    if value is None or (name == "model" and (config.init or value in CONFIGS)):
        return value
    if name == "init":
        return folder_hash((file.name, file) for file in _model_files(Path(value)))
    path, function = Path(value), ""
    if name == "reward":  # FILE.py:FUNCTION, or the name of a reward
        file, _, function = value.rpartition(":")
        path = Path(file)
        if path.suffix != ".py":
            return value
    if not path.is_file():
        raise ValueError(f"{config.shown(name)} {path}: no such file")
    return [file_hash(path), function]


def _model_files(folder: Path) -> list[Path]:
    """The config.json and weights of --init. ValueError if there is no such folder."""
    if not folder.is_dir():
        raise ValueError(f"--init {folder}: no such folder")
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]
    return sorted([folder / "config.json", *weights])


def init_sample(config: TrainConfig) -> str:
    """A hash of the names, sizes and first and last MiB of the files of --init: what every rank can
    read of a large model to see that it has the same. inputs.json has the hash of the whole."""
    found = hashlib.sha256()
    for path in _model_files(Path(config.init)):
        with open(path, "rb") as f:
            size = f.seek(0, os.SEEK_END)
            found.update(f"{path.name}\n{size}\n".encode("utf-8", "surrogateescape"))
            for start in (0, max(0, size - 2**20)):
                f.seek(start)
                found.update(f.read(2**20))
    return found.hexdigest()[:16]


def adapter_hash(folder: str | None) -> str | None:
    """A hash of adapters in PEFT's format. ValueError if there are none."""
    if folder is None:
        return None
    files = [Path(folder) / name for name in ADAPTER_FILES]
    for file in files:
        if not file.is_file():
            raise ValueError(f"adapter {file}: no such file; if it has moved, give its new place")
    return folder_hash((file.name, file) for file in files)


def record_inputs(config: TrainConfig) -> None:
    """Begin OUT/inputs.json: the content of each input, but of --lora-jobs, which record_job has.
    Files of an earlier start are set aside."""
    set_aside(config.out)
    names = ("init", "model", "reward") if config.lora_jobs else ("data", "init", "model", "reward")
    _write(config.out, {name: input_hash(config, name) for name in names})


def record_job(config: TrainConfig, adapter: str | None) -> None:
    """The same of one of --lora-jobs, in its own folder: of its data and its adapter."""
    set_aside(config.out)
    hashes = {"data": input_hash(config, "data"), "adapter": adapter_hash(adapter)}
    _write(config.out, hashes)


def record_files(out: Path) -> None:
    """Add the hashes of OUT's checkpoint files and tokens, now complete, to OUT/inputs.json."""
    paths = [*checkpoint_files(out), *(out / name for name in TOKEN_FILES)]
    hashes = {str(p.relative_to(out)): file_hash(p) for p in paths if p.exists()}
    _write(out, read_inputs(out) | {"files": hashes})


def _write(out: Path, values: dict[str, Any]) -> None:
    write_atomically(out / INPUTS, lambda tmp: tmp.write_text(json.dumps(values, indent=1)))


def read_inputs(out: Path) -> dict[str, Any]:
    """OUT/inputs.json; {} if the run is older than this file, or the file is damaged."""
    try:
        values = json.loads((out / INPUTS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def verify_files(out: Path) -> None:
    """ValueError for a checkpoint or token file of OUT that is not as the run wrote it, and for a
    checkpoint file that is missing or was added. Missing tokens are written again."""
    recorded = read_inputs(out).get("files")
    if recorded is None:
        return
    for path in checkpoint_files(out):
        if str(path.relative_to(out)) not in recorded:
            raise ValueError(f"{path}: was added since the run began; remove it, {ANOTHER_RUN}")
    for name, before in recorded.items():
        path = out / name
        if not path.exists() and name in TOKEN_FILES:
            continue
        if not path.exists() or file_hash(path) != before:
            what = "has changed" if path.exists() else "was removed"
            raise ValueError(f"{path}: {what} since the run began; restore it, {ANOTHER_RUN}")


def verify_init(config: TrainConfig) -> None:
    """ValueError if the model of --init, which the run still needs, has moved or changed."""
    if not config.init.is_dir():
        raise ValueError(
            f"--init {config.init}: no such folder; if it has moved, give --init its new place"
        )
    before = read_inputs(config.out).get("init")
    if before is not None and input_hash(config, "init") != before:
        raise ValueError(
            f"--init {config.init}: its config.json or weights have changed since the run began; "
            f"restore them, {ANOTHER_RUN}"
        )


def verify_input(config: TrainConfig, name: str) -> None:
    """ValueError if what a setting refers to, of which the run still needs a part, has moved or
    changed."""
    before = read_inputs(config.out).get(name)
    if before is not None and input_hash(config, name) != before:
        value = getattr(config, name)
        text = " ".join(value) if isinstance(value, list) else value
        raise ValueError(
            f"{config.shown(name)} {text}: has changed since the run began; restore it, "
            f"{ANOTHER_RUN}"
        )
