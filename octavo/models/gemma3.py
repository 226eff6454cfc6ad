"""Gemma 3, text: norms of 1 + w, before and after attention and MLP; QK-norm; scaled embeddings;
five sliding layers with a RoPE of their own to each full one."""

from octavo.models.family import Family, Names

GEMMA3 = Family(
    "gemma3_text",
    fixed={"qk_norm": True, "mlp_bias": False, "norm_offset": 1.0, "output_norms": True},
    names=Names(
        attention_output_norm="post_attention_layernorm.weight",
        mlp_norm="pre_feedforward_layernorm.weight",
        mlp_output_norm="post_feedforward_layernorm.weight",
    ),
    fits_float16=False,  # the 270M reaches 100,000 on plain prose
)
