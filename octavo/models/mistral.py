"""Mistral: Llama without biases; the first releases have a sliding window in every layer."""

from octavo.models.family import Family

MISTRAL = Family(
    "mistral",
    fixed={"qkv_bias": False, "o_bias": False, "mlp_bias": False, "qk_norm": False},
)
