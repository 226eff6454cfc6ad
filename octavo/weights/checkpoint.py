"""Checkpoint: a model's numbers at once, its tensors when asked. Torch waits for the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from octavo.core.errors import StartupError
from octavo.core.spec import ModelSpec
from octavo.weights.folder import read_config, read_generation_config
from octavo.weights.gguf_header import config_from_gguf, read_header
from octavo.weights.locate import Located, locate_path
from octavo.weights.shards import Shards, find_shards, read_entries
from octavo.weights.spec import spec_from_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from octavo.weights.loader import LoadReport, WeightSlot

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy", "dummy:normal")
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Shapes = Mapping[str, tuple[int, ...]]


class Source(Protocol):
    """Named tensors of one format. ``shapes`` None: not known before they are read."""

    @property
    def shapes(self) -> Shapes | None: ...

    def file_of(self, name: str) -> object: ...

    def tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]: ...


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint, its files found whole.

    ``config`` is the Hugging Face config (of a GGUF file: the one it amounts to), before
    overrides. ``generation_config`` holds sampling defaults, {} if there are none.
    ``total_bytes`` are the tensors' bytes as stored (of random weights: as they would be).
    """

    path: Path
    name: str
    spec: ModelSpec
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    total_bytes: int
    _open: Callable[[Shapes | None], Source]

    def tensors(
        self, dtype: torch.dtype | None = None, shapes: Shapes | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Tensors under their Hugging Face names, lazily.

        What is computed (dequantised, random) comes in ``dtype`` (None: fp32), what is stored as it
        is. Random weights need ``shapes``.
        """
        return self._open(shapes).tensors(dtype)

    def load(self, slots: Mapping[str, WeightSlot], dtype: torch.dtype | None = None) -> LoadReport:
        """Fill ``slots``; names and shapes are checked before any tensor is read.

        Raises :class:`StartupError` naming tensor and file.
        """
        from octavo.weights.loader import check_shapes, load_weights

        source = self._open({name: slot.shape for name, slot in slots.items()})
        tied = self.spec.tie_embeddings
        if source.shapes is not None:
            check_shapes(slots, source.shapes, tied_head=tied, file_of=source.file_of)
        return load_weights(slots, source.tensors(dtype), tied_head=tied, file_of=source.file_of)


def open_checkpoint(
    model: Located | Path | str,
    load_format: str = "auto",
    overrides: Mapping[str, Any] | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Checkpoint:
    """Read the configuration and check that every file is there and whole.

    ``seed`` and ``device`` are those of random weights: stored ones come as they lie on disk.
    Raises :class:`StartupError`: what is broken, missing or not supported, by name.
    """
    located = model if isinstance(model, Located) else locate_path(Path(model))
    if load_format not in LOAD_FORMATS:
        raise StartupError(
            f"load_format must be one of {', '.join(LOAD_FORMATS)}, not {load_format!r}."
        )
    stored_as = {"folder": "safetensors", "gguf": "gguf"}[located.kind]
    if load_format in ("safetensors", "gguf") and load_format != stored_as:
        raise StartupError(f"load_format is {load_format}, but {located.path} is {stored_as}.")
    if located.kind == "gguf":
        checkpoint = _open_gguf(located, overrides)
    else:
        checkpoint = _open_folder(located, load_format, overrides)
    if not load_format.startswith("dummy"):
        return checkpoint
    num_bytes = checkpoint.spec.num_params * (4 if checkpoint.spec.dtype == "float32" else 2)
    return replace(
        checkpoint, total_bytes=num_bytes, _open=_dummy_opener(load_format, seed, device)
    )


def _open_gguf(located: Located, overrides: Mapping[str, Any] | None) -> Checkpoint:
    header = read_header(located.path)
    config = config_from_gguf(header)
    spec = spec_from_config(config, overrides=overrides, file=str(located.path))

    def source(shapes: Shapes | None) -> Source:
        from octavo.weights.gguf import GgufSource

        return GgufSource(header, spec.num_heads, spec.num_kv_heads)

    return Checkpoint(located.path, located.name, spec, config, {}, header.total_bytes, source)


def _open_folder(
    located: Located, load_format: str, overrides: Mapping[str, Any] | None
) -> Checkpoint:
    folder = located.path
    config = read_config(folder)
    generation = read_generation_config(folder)
    spec = spec_from_config(config, generation, overrides, file=str(folder / "config.json"))
    checkpoint = Checkpoint(folder, located.name, spec, config, generation, 0, _no_weights)
    if load_format.startswith("dummy"):
        return checkpoint
    shards = find_shards(folder, "model", ".safetensors")
    if shards.files:
        return _with_safetensors(checkpoint, shards, {**config, **(overrides or {})})
    shards = find_shards(folder, "pytorch_model", ".bin")
    if not shards.files or load_format == "safetensors":
        raise StartupError(f"{folder} holds no weights (*.safetensors).")
    return _with_torch_bin(checkpoint, shards)


def _with_safetensors(
    checkpoint: Checkpoint, shards: Shards, config: Mapping[str, Any]
) -> Checkpoint:
    """A config that states no dtype gets that of most tensors."""
    entries = read_entries(shards)
    spec = checkpoint.spec
    if config.get("dtype") is None and config.get("torch_dtype") is None and entries:
        stored = [entry.dtype for entry in entries.values()]
        most = max(set(stored), key=stored.count)
        spec = replace(spec, dtype=_DTYPES.get(most, spec.dtype))

    def source(shapes: Shapes | None) -> Source:
        from octavo.weights.safetensors import SafetensorsSource

        return SafetensorsSource(entries)

    return replace(checkpoint, spec=spec, total_bytes=shards.total_bytes, _open=source)


def _with_torch_bin(checkpoint: Checkpoint, shards: Shards) -> Checkpoint:
    def source(shapes: Shapes | None) -> Source:
        from octavo.weights.torch_bin import TorchBinSource

        return TorchBinSource(shards.files)

    return replace(checkpoint, total_bytes=shards.total_bytes, _open=source)


def _dummy_opener(load_format: str, seed: int, device: str) -> Callable[[Shapes | None], Source]:
    def source(shapes: Shapes | None) -> Source:
        from octavo.weights.dummy import DummySource

        if shapes is None:
            raise ValueError("Random weights need the shapes of the model's slots.")
        return DummySource(shapes, load_format, seed, device)

    return source


def _no_weights(shapes: Shapes | None) -> Source:
    raise ValueError("This checkpoint was opened without weights.")
