"""Llama 2 and 3, SmolLM2, and whatever else calls itself LlamaForCausalLM."""

from octavo.models.family import Family

LLAMA = Family("llama", fixed={"qk_norm": False})
