"""Tensors of ``pytorch_model*.bin``, for checkpoints that have nothing newer."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from octavo.core.errors import StartupError


class TorchBinSource:
    """Only tensors are unpickled (``weights_only``); any other object is an error."""

    shapes = None  # not known before the files are read

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._file_of: dict[str, Path] = {}

    def file_of(self, name: str) -> Path:
        return self._file_of.get(name, self._files[0].parent)

    def tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        for file in self._files:
            for name, tensor in _load(file).items():
                if not isinstance(tensor, Tensor):
                    raise StartupError(
                        f"{file}: {name} is a {type(tensor).__name__}, not a tensor."
                    )
                self._file_of[name] = file
                yield name, tensor


def _load(file: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StartupError(
            f"Cannot read {file} ({file.stat().st_size} bytes) as tensors: {reason}"
        ) from None
    if not isinstance(tensors, dict):
        raise StartupError(f"{file} holds a {type(tensors).__name__}, not tensors by name.")
    return tensors
