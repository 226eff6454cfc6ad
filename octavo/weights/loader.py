"""Fill a model's slots from a stream of tensors: all of them, and nothing left over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.core.errors import StartupError

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
HARMLESS = (".rotary_emb.inv_freq",)  # computed anew; old checkpoints carry it
MAX_NAMES = 5  # in a message


@dataclass(frozen=True)
class WeightSlot:
    """A tensor that a model wants, by its full checkpoint ``shape``; ``load`` keeps a share."""

    shape: tuple[int, ...]
    load: Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """``num_bytes`` as they came from the checkpoint, dequantised."""

    num_bytes: int
    num_tensors: int
    seconds: float


def check_shapes(
    slots: Mapping[str, WeightSlot],
    shapes: Mapping[str, Sequence[int]],
    *,
    tied_head: bool = False,
    file_of: Callable[[str], object] = lambda name: "the checkpoint",
) -> None:
    """Raise :class:`StartupError` unless ``shapes`` are the slots', name for name.

    With ``tied_head`` a head in the checkpoint is no surplus (the model has no slot for it).
    """
    for name, slot in slots.items():
        if name in shapes and tuple(shapes[name]) != tuple(slot.shape):
            raise StartupError(
                f"{file_of(name)}: tensor {name} has shape {list(shapes[name])}, "
                f"the model's is {list(slot.shape)}."
            )
    missing = [name for name in slots if name not in shapes]
    if missing:
        hint = " (set tie_word_embeddings if the model has none)" if missing == [HEAD] else ""
        source = file_of(next(iter(shapes), ""))
        raise StartupError(f"{source}: {_listed(missing)} missing from the checkpoint{hint}.")
    surplus = [
        name
        for name in shapes
        if name not in slots and not name.endswith(HARMLESS) and not (tied_head and name == HEAD)
    ]
    if surplus:
        raise StartupError(
            f"{file_of(surplus[0])}: {_listed(surplus)} in the checkpoint but not in the model."
        )


def load_weights(
    slots: Mapping[str, WeightSlot],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    tied_head: bool = False,
    file_of: Callable[[str], object] = lambda name: "the checkpoint",
) -> LoadReport:
    """Give each tensor to its slot. Raises :class:`StartupError` as :func:`check_shapes` does.

    With ``tied_head`` a head in the checkpoint is compared with the embedding and left out,
    with a warning if they differ.
    """
    start = time.perf_counter()
    shapes: dict[str, tuple[int, ...]] = {}
    num_bytes = 0
    tied: dict[str, Tensor] = {}
    for name, tensor in tensors:
        shapes[name] = tuple(tensor.shape)
        if tied_head and name in (EMBEDDING, HEAD):
            tied[name] = tensor
        slot = slots.get(name)
        if slot is not None:
            check_shapes({name: slot}, {name: shapes[name]}, file_of=file_of)
            if not tensor.is_floating_point():
                raise StartupError(
                    f"{file_of(name)}: tensor {name} holds {tensor.dtype}; quantised weights of "
                    "this kind are not supported."
                )
            slot.load(tensor)
            num_bytes += tensor.nbytes
    check_shapes(slots, shapes, tied_head=tied_head, file_of=file_of)
    if HEAD in tied and HEAD not in slots:
        _report_ignored_head(tied[HEAD], tied.get(EMBEDDING), file_of(HEAD))
    return LoadReport(num_bytes, len(slots), time.perf_counter() - start)


def _report_ignored_head(head: Tensor, embedding: Tensor | None, file: object) -> None:
    if embedding is not None and head.shape == embedding.shape and torch.equal(head, embedding):
        logger.info("%s: %s equals the embedding that it is tied to; ignored.", file, HEAD)
    else:
        logger.warning(
            "%s: %s differs from the embedding, but tie_word_embeddings is true; it is ignored. "
            "If it is meant, override tie_word_embeddings to false.",
            file,
            HEAD,
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES])
    rest = len(names) - MAX_NAMES
    return (
        f"{shown} and {rest} more are"
        if rest > 0
        else f"{shown} {'is' if len(names) == 1 else 'are'}"
    )
