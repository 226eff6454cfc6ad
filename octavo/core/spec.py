"""ModelSpec: what an architecture is, with every naming quirk already absorbed.

Built once by :mod:`octavo.weights.spec` from a Hugging Face ``config.json`` or
GGUF metadata. Nothing below that function ever sees the original names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mixer = Literal["full", "sliding", "mla", "state"]
Mlp = Literal["dense", "moe"]
RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021) and its long-context scaling.

    ``dim`` is the number of rotated features a head (``head_dim`` unless partial).
    ``original_max_position`` is the length the model was trained at; only the
    kinds that need it (dynamic, yarn, llama3) read it.
    """

    theta: float
    dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1·ln(factor) + 1
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: how it mixes tokens and what its MLP is."""

    mixer: Mixer = "full"
    mlp: Mlp = "dense"
    window: int = 0  # tokens visible to a sliding layer, itself included; 0 = all


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer, as numbers."""

    family: str  # "llama", "mistral", "qwen2", "qwen3", "gemma3_text"
    architecture: str  # the checkpoint's own class name, for messages
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int  # longest context the model supports, scaling included
    norm_eps: float
    rope: RopeSpec
    layers: tuple[LayerSpec, ...]
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"  # or "gelu_tanh"; of the gate
    norm_offset: float = 0.0  # added to a norm's weight; then norms multiply in fp32
    output_norms: bool = False  # attention and MLP are normed once more before the residual sum
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # None: head_dim ** -0.5
    local_rope: RopeSpec | None = None  # of sliding layers, where it is not ``rope``
    dtype: str = "bfloat16"  # of the checkpoint
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()  # union of config and generation_config
    quantization: str | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_params(self) -> int:
        """Weights in the model (embeddings once if tied; biases and norms left out)."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * (attention + mlp) + embeddings
