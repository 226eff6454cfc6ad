"""Sampling on a GPU: Triton kernels that draw what the reference draws."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from octavo.ops.sampling.reference import BLOCK, DrawParams, SamplingOps
from octavo.ops.triton.cut import cut_kernel, scan_kernel
from octavo.ops.triton.race import race_kernel

_SCANNED = 16  # blocks a program of the first pass
_TILE = 2048  # ids at a time of the search for a cut
_KEPT = 1024  # ids that the search ends with, in registers
_WARPS = 8
RACE = (8, 128)  # warps and most registers a thread of a row's race


class TritonSamplingOps(SamplingOps):
    """Draws in three launches; the rest is the reference's. Nothing waits for the device.

    A row costs one scan of its logits. One that uses ``top_k`` costs a few more of the blocks that
    hold its best ids; one that uses ``top_p``, one of the ids before each id that is drawn, which
    are 1 + ln(1 / top_p) on average.
    """

    name = "triton"

    def __init__(
        self,
        *,
        early: bool = False,
        tile: int = _TILE,
        kept: int = _KEPT,
        race: tuple[int, int] = RACE,
    ) -> None:
        """``early``: as in :class:`octavo.ops.triton.backend.TritonOps`; ``race``: warps of a row's
        race, and the most registers a thread (0: any)."""
        self._tile, self._kept = tile, kept
        warps, registers = race
        self._race = {"num_warps": warps} | ({"maxnreg": registers} if registers else {})
        self._early: dict[str, Any] = {"EARLY": early}
        if early:
            self._early["launch_pdl"] = True

    def draw(self, logits: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
        rows, size = logits.shape
        num_blocks = triton.cdiv(size, BLOCK)
        width = triton.next_power_of_2(num_blocks)
        bits = max(1, (size - 1).bit_length())
        device = logits.device
        block_keys, block_ids, blocks = torch.empty(
            (3, rows, num_blocks), dtype=torch.int32, device=device
        )
        masses, leads = torch.empty((2, rows, num_blocks), dtype=torch.float64, device=device)
        codes = torch.empty((rows, self._kept), dtype=torch.int64, device=device)
        picked = torch.empty((rows, self._kept), dtype=torch.int32, device=device)
        cuts = torch.empty(rows, dtype=torch.int64, device=device)
        wanteds = torch.empty(rows, dtype=torch.float64, device=device)
        ids = torch.empty(rows, dtype=torch.int64, device=device)
        status = torch.empty(rows, dtype=torch.int8, device=device)
        if not rows:
            return ids, status
        scan_kernel[(rows, triton.cdiv(num_blocks, _SCANNED))](
            logits, params.temperature, params.top_k, params.top_p, block_keys, block_ids, masses,
            size, num_blocks, BLOCK=BLOCK, BLOCKS=_SCANNED, num_warps=4, **self._early,
        )  # fmt: skip
        cut_kernel[(rows,)](
            logits, block_keys, masses, params.temperature, params.top_k, params.top_p, blocks,
            codes, cuts, wanteds, size, num_blocks, BITS=bits, BLOCK=BLOCK, TILE=self._tile,
            KEPT=self._kept, WIDTH=width, num_warps=_WARPS, **self._early,
        )  # fmt: skip
        race_kernel[(rows,)](
            logits, block_keys, block_ids, cuts, wanteds, params.temperature, params.min_p,
            params.seed, params.index, ids, status, blocks, leads, picked, size, num_blocks,
            BITS=bits, BLOCK=BLOCK, TILE=self._tile, RACED=min(self._tile, self._kept),
            KEPT=self._kept, WIDTH=width, **self._race, **self._early,
        )  # fmt: skip
        return ids, status
