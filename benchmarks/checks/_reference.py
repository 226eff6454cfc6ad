"""transformers on the embedded model's own file, as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from octavo.weights.locate import locate


def load_transformers(dtype: torch.dtype) -> Any:
    """The embedded model, dequantised, in eager evaluation."""
    from transformers import AutoModelForCausalLM, GgufConfig

    path = Path(locate(None).path)
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=dtype,
    )
    return model.to(dtype).eval()
