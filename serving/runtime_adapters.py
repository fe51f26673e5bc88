"""Adapters that clients of the HTTP server load and unload while it runs: --runtime-adapters DIR.

Off by default, as VLLM_ALLOW_RUNTIME_LORA_UPDATING is: who may load an adapter decides what a model
says, and takes memory. With the flag every key may load adapters from folders in DIR, up to
--set max_adapters in all, and unload those that it loaded; adapters of --adapters belong to the
first key. A path that leads out of DIR, by links too, gives one answer whatever is there, and no
answer contains a path of this machine.

Needs: adapters.py's AdapterPool.
"""

from __future__ import annotations

if __name__ == "__main__":
    raise SystemExit("this is a part of generate.py; run: python generate.py --help")

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from huggingface.tokenizer import one_line
from generation.adapters import Adapter, AdapterPool


@dataclass
class RuntimeAdapters:
    """What clients may change of an AdapterPool."""

    pool: AdapterPool
    read: Callable[[str, Path], Adapter]  # name, folder -> an adapter that is not served yet
    folder: Path  # --runtime-adapters, which has the folders of adapters
    max_adapters: int = 64  # at once, those of --adapters included
    owners: dict[str, str] = field(default_factory=dict)  # adapter -> the key that loaded it

    def check_room(self) -> None:
        """ValueError if there are as many adapters as there may be."""
        if len(self.pool.adapters) >= self.max_adapters:
            limit = f"{self.max_adapters} adapters are loaded, the most that this server takes"
            raise ValueError(f"{limit}; unload one")

    def read_from(self, name: str, path: str) -> Adapter:
        """Read an adapter; takes long. path: absolute, or relative to the folder. ValueError says
        what is wrong, with the path as it was given."""
        root = os.path.realpath(self.folder)
        try:
            folder = os.path.realpath(os.path.join(root, path))
            # a cache of the Hugging Face hub has links to files elsewhere in it
            files = [f.path for f in os.scandir(folder)]
            files += Path(folder).glob("additional_chat_templates/*")
            targets = [folder, *map(os.path.realpath, files)]
            is_inside = all(os.path.commonpath([root, target]) == root for target in targets)
        except (ValueError, OSError):  # a null byte; not there, not a folder, no permission
            is_inside = False
        if not is_inside:
            raise ValueError("lora_path must be a folder in the folder of --runtime-adapters")
        try:
            return self.read(name, Path(folder))
        except ValueError as e:
            raise ValueError(one_line(e).replace(folder, path)) from None

    def check_owner(self, name: str, key: str, first_key: str) -> None:
        """ValueError if an adapter is not loaded, or another key's."""
        if name not in self.pool.adapters or self.owners.get(name, first_key) != key:
            raise ValueError(f"this key has loaded no adapter {name!r}")
