"""Tensors straight from the memory map of safetensors files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from octavo.core.errors import StartupError
from octavo.weights.shards import Entry


class SafetensorsSource:
    """The tensors of checked files (:func:`octavo.weights.shards.read_entries`)."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self.shapes = {name: entry.shape for name, entry in entries.items()}

    def file_of(self, name: str) -> Path:
        return self._entries[name].file

    def tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Views of the map, file by file, in the file's own dtype: nothing is read until used."""
        from safetensors import SafetensorError, safe_open

        for file, group in groupby(self._entries.items(), key=lambda item: item[1].file):
            try:
                with safe_open(file, framework="pt", device="cpu") as opened:
                    for name, _ in group:
                        yield name, opened.get_tensor(name)
            except SafetensorError as error:
                raise StartupError(f"Cannot read {file}: {error}.") from None
