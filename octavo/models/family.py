"""A family: what a model of the Llama kind is called in a checkpoint, and what it fixes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.core.errors import StartupError
from octavo.core.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Names:
    """Checkpoint names; the defaults are Hugging Face's Llama. A layer's come after its prefix."""

    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{}."
    input_norm: str = "input_layernorm.weight"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    mlp_norm: str = "post_attention_layernorm.weight"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    attention_output_norm: str = ""  # these two where spec.output_norms
    mlp_output_norm: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """``fixed`` are the fields of a spec that this family leaves no choice about.

    ``fits_float16``: no hidden state of the released models is above its 65,504.
    """

    name: str
    fixed: Mapping[str, bool | float]
    names: Names = field(default_factory=Names)
    fits_float16: bool = True

    def check(self, spec: ModelSpec) -> None:
        """Raises :class:`StartupError` for a spec that is not of this family."""
        for name, value in self.fixed.items():
            given = getattr(spec, name)
            if given != value:
                raise StartupError(
                    f"{spec.architecture} ({self.name}) has {name} = {value}, not {given}."
                )
