"""Rotary embedding settings of a Hugging Face config, old and new spelling: RopeSpec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.spec import RopeSpec
from octavo.weights.reader import Reader

KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
MAX_FACTOR = 1e6
DEFAULT_THETA = 10_000.0  # what every family here means by no rope_theta

_NEW, _OLD, _THETA = "rope_parameters", "rope_scaling", "rope_theta"


def rope_spec(config: Reader, head_dim: int, max_position: int) -> tuple[RopeSpec, int]:
    """RopeSpec, and the longest context with its scaling applied.

    ``rope_parameters`` (transformers 5) and ``rope_theta`` + ``rope_scaling`` (before) say the
    same; so do ``type`` and ``rope_type``. linear and dynamic stretch
    ``max_position_embeddings`` by their factor, yarn its own original length; llama3 is
    trained at ``max_position_embeddings``.
    """
    rope = config.section(_OLD if config.has(_OLD) else _NEW)
    theta = rope.number(_THETA, config.number(_THETA, DEFAULT_THETA))
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise rope.error("full_attention", "(settings by layer type) is not supported")
    _refuse_partial(config)
    spec = rope_of(rope, head_dim, theta, max_position)
    if spec.kind in ("linear", "dynamic", "yarn"):
        return spec, int(spec.original_max_position * spec.factor)
    return spec, max_position


def rope_of(rope: Reader, head_dim: int, theta: float, trained: int) -> RopeSpec:
    """One set of settings of a model trained at ``trained`` positions (yarn's and llama3's say
    themselves)."""
    _refuse_partial(rope)
    kind = rope.text("rope_type", rope.text("type", "default"))
    match kind:
        case "default":
            return RopeSpec(theta, head_dim)
        case "linear" | "dynamic":
            factor = _factor(rope)
            return RopeSpec(theta, head_dim, kind, factor, original_max_position=trained)
        case "yarn":
            return _yarn(rope, theta, head_dim)
        case "llama3":
            return _llama3(rope, theta, head_dim)
    raise rope.error("rope_type", f"must be one of {', '.join(KINDS)}, not {kind!r}")


def override_rope(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` without the rope settings that ``overrides`` replaces under the other spelling.

    The theta stays unless it is replaced too: overriding only the scaling keeps it.
    """
    kept = dict(config)
    old = kept.get(_OLD) or kept.get(_NEW)
    theta = old.get(_THETA) if isinstance(old, dict) else None
    if _OLD in overrides or _NEW in overrides:
        kept.pop(_OLD, None)
        kept.pop(_NEW, None)
    elif _THETA in overrides and isinstance(old, dict):
        kept[_OLD if kept.get(_OLD) else _NEW] = {**old, _THETA: overrides[_THETA]}
    if theta is not None:
        kept[_THETA] = theta
    return kept


def _yarn(rope: Reader, theta: float, dim: int) -> RopeSpec:
    """YaRN (Peng et al. 2023)."""
    return RopeSpec(
        theta,
        dim,
        "yarn",
        _factor(rope),
        original_max_position=rope.integer("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
    )


def _llama3(rope: Reader, theta: float, dim: int) -> RopeSpec:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"must be above low_freq_factor {low:g}, not {high:g}")
    return RopeSpec(
        theta,
        dim,
        "llama3",
        _factor(rope),
        original_max_position=rope.integer("original_max_position_embeddings"),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _factor(rope: Reader) -> float:
    factor = rope.number("factor")
    if not 1 <= factor <= MAX_FACTOR:
        raise rope.error("factor", f"must be between 1 and {MAX_FACTOR:g}, not {factor:g}")
    return factor


def _refuse_partial(values: Reader) -> None:
    if values.number("partial_rotary_factor", 1.0) != 1.0:
        raise values.error("partial_rotary_factor", "other than 1 is not supported")
