"""A checkpoint's tensors into a model, with somebody told how far it is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from octavo.models.decoder import Decoder
from octavo.weights.checkpoint import Checkpoint
from octavo.weights.loader import WeightSlot

log = logging.getLogger("octavo.engine")

Progress = Callable[[str, float], None]


def fill_model(
    model: Decoder, checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress
) -> str:
    """Load every tensor and pack it; says how much it was. ``progress(stage, share)`` is told."""
    start = time.perf_counter()
    stage = f"Loading weights of {checkpoint.name}"
    slots = _counted(model.weight_slots(), lambda share: progress(stage, share))
    with torch.inference_mode():
        report = checkpoint.load(slots, dtype)
        model.after_load()
    text = f"{report.num_bytes / 2**30:.2f} GiB in {time.perf_counter() - start:.1f} s"
    log.info("Weights: %s (%d tensors)", text, report.num_tensors)
    return text


def _counted(slots: dict[str, WeightSlot], tell: Callable[[float], None]) -> dict[str, WeightSlot]:
    """The same slots, telling the share of tensors that have been loaded."""
    done = 0

    def counted(slot: WeightSlot) -> WeightSlot:
        def load(tensor: torch.Tensor) -> None:
            nonlocal done
            slot.load(tensor)
            done += 1
            tell(done / len(slots))

        return WeightSlot(slot.shape, load)

    return {name: counted(slot) for name, slot in slots.items()}
