"""Qwen3: RMSNorm on each head's q and k before they are rotated."""

from octavo.models.family import Family

QWEN3 = Family("qwen3", fixed={"mlp_bias": False, "qk_norm": True})
