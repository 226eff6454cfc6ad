"""Which families exist, and a model of one."""

from __future__ import annotations

import torch

from octavo.core.errors import StartupError
from octavo.core.spec import ModelSpec
from octavo.distributed.comm import Communicator
from octavo.models.decoder import Decoder
from octavo.models.family import Family
from octavo.models.gemma3 import GEMMA3
from octavo.models.llama import LLAMA
from octavo.models.mistral import MISTRAL
from octavo.models.qwen2 import QWEN2
from octavo.models.qwen3 import QWEN3
from octavo.ops.api import Ops

FAMILIES: dict[str, Family] = {
    family.name: family for family in (GEMMA3, LLAMA, MISTRAL, QWEN2, QWEN3)
}


def build_model(
    spec: ModelSpec,
    ops: Ops,
    comm: Communicator,
    dtype: torch.dtype,
    device: torch.device,
    max_position: int,
) -> Decoder:
    """An unloaded model of ``spec``, this rank's share of it, for contexts up to ``max_position``.

    Fill its ``weight_slots()``, then call ``after_load()``. Raises :class:`StartupError` if
    the spec asks for something that no family here has, or cannot be split over the ranks.
    """
    family = FAMILIES.get(spec.family)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise StartupError(f"{spec.architecture} is not supported; model families are {known}.")
    family.check(spec)
    if dtype is torch.float16 and not family.fits_float16:
        raise StartupError(
            f"{spec.architecture} overflows float16; use --dtype bfloat16 or --dtype float32."
        )
    return Decoder(spec, ops, comm, dtype, device, max_position, names=family.names)
