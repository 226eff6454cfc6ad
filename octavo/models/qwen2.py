"""Qwen2, Qwen2.5 and Qwen1.5: a bias on q, k and v alone; a window in the upper layers, if any."""

from octavo.models.family import Family

QWEN2 = Family(
    "qwen2",
    fixed={"qkv_bias": True, "o_bias": False, "mlp_bias": False, "qk_norm": False},
)
