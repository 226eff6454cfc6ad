"""Rotary position embedding: one table of cosines and sines, computed once at start.

Rotation itself is an op. All arithmetic is fp32 and in the order of the reference implementation
(transformers): at position 131,071 one rounding of a frequency moves an angle by up to 8e-3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.core.spec import RopeSpec


def rope_table(rope: RopeSpec, max_position: int, device: torch.device | str = "cpu") -> Tensor:
    """fp32 [max_position, dim]: dim / 2 cosines, then dim / 2 sines, for each position.

    ``max_position`` is the longest context served. "dynamic" (NTK-aware scaling by length) is
    computed for that length once, not anew as a sequence grows: keys already in the cache were
    rotated at one length, and must agree with the queries. At and below the trained length it
    is the default. yarn's attention factor is folded into the table, on q and on k.
    """
    angles = torch.outer(torch.arange(max_position).float(), _frequencies(rope, max_position))
    factor = _attention_factor(rope)
    angles = angles.double()  # in fp32 a process's first cosines may be off by 4e-4
    table = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)
    return table.float().to(device)


def _frequencies(rope: RopeSpec, max_position: int) -> Tensor:
    """Radians per position, fp32 [dim / 2]."""
    match rope.kind:
        case "linear":
            return _inverse_wavelengths(rope.theta, rope.dim) / rope.factor
        case "dynamic":
            return _inverse_wavelengths(_dynamic_theta(rope, max_position), rope.dim)
        case "yarn":
            return _yarn(rope)
        case "llama3":
            return _llama3(rope)
        case _:
            return _inverse_wavelengths(rope.theta, rope.dim)


def _inverse_wavelengths(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)


def _dynamic_theta(rope: RopeSpec, max_position: int) -> float:
    trained = rope.original_max_position
    stretch = rope.factor * max(max_position, trained) / trained - (rope.factor - 1)
    return rope.theta * float(stretch ** (rope.dim / (rope.dim - 2)))


def _yarn(rope: RopeSpec) -> Tensor:
    """YaRN (Peng et al. 2023): slow features are interpolated, fast ones kept, a ramp between."""
    low, high = _yarn_range(rope)
    ramp = ((torch.arange(rope.dim // 2).float() - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    wavelengths = rope.theta ** (torch.arange(0, rope.dim, 2).float() / rope.dim)
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _yarn_range(rope: RopeSpec) -> tuple[float, float]:
    """The features that turn ``beta_fast`` and ``beta_slow`` times within the trained length."""

    def feature(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return rope.dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = feature(rope.beta_fast), feature(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    return low, high if high != low else high + 0.001


def _attention_factor(rope: RopeSpec) -> float:
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(rope: RopeSpec) -> Tensor:
    """Llama 3.1's scaling: by wavelength, long ones divided by ``factor``, a blend between."""
    frequencies = _inverse_wavelengths(rope.theta, rope.dim)
    wavelengths = 2 * math.pi / frequencies
    trained = rope.original_max_position
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = (trained / wavelengths - low) / (high - low)
    blend = (1 - kept) * frequencies / rope.factor + kept * frequencies
    scaled = torch.where(wavelengths > trained / low, frequencies / rope.factor, blend)
    return torch.where(wavelengths < trained / high, frequencies, scaled)
