"""The whole engine on a GPU: right ids first, then offline workloads as a baseline.

    python -m benchmarks.gpu_engine --out DIR [--device cpu --tiny]

Ids of a random tiny fp32 model on the GPU are compared with the CPU reference's (a difference is
forgiven only at a tie of the reference); then each workload runs on random weights. Figures go to
``DIR/gpu_engine.json``; ``--device cpu --tiny`` is the dry run.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parent / "models"
TINY = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "dtype": "float32",
}  # fmt: skip


def lengths_w1(count: int) -> tuple[list[int], list[int]]:
    """Prompt and output lengths of 100 to 1,024 tokens, the same in every run."""
    draw = random.Random(0)
    return tuple([draw.randint(100, 1024) for _ in range(count)] for _ in range(2))  # type: ignore[return-value]


def workloads(tiny: bool) -> dict[str, tuple[list[int], list[int], float]]:
    """Name: prompt lengths, output lengths, temperature."""
    scale = 16 if tiny else 1
    w1 = lengths_w1(256 // scale)
    return {
        "W2": ([128], [256 // scale], 0.0),
        "W4": ([32] * (512 // scale), [512 // scale] * (512 // scale), 0.0),
        "W3": ([4096 // scale] * (32 // scale), [1] * (32 // scale), 0.0),
        "W1": ([n // scale + 1 for n in w1[0]], [n // scale + 1 for n in w1[1]], 0.6),
    }


def compare_ids(device: str) -> dict[str, Any]:
    """Greedy ids of the tiny model on ``device`` beside the CPU reference's."""
    from octavo import LLM, SamplingParams

    draw = random.Random(1)
    prompts = [[draw.randrange(1024) for _ in range(draw.randint(3, 400))] for _ in range(24)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY))
        for options in ({"device": device}, {"device": "cpu", "ops_backend": "reference"}):
            with LLM(
                folder, load_format="dummy:normal", skip_tokenizer_init=True, dtype="float32",
                kv_cache_tokens=16384, max_num_batched_tokens=256, max_num_seqs=16, **options,
            ) as llm:  # fmt: skip
                found.append(llm.generate(prompts, params, use_tqdm=False))
                llm.audit()
    equal = sum(
        ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        for ours, theirs in zip(*found, strict=True)
    )
    return {"equal": equal, "of": len(prompts)}


def run_model(name: str, device: str, tiny: bool, budget_s: float) -> list[dict[str, Any]]:
    from octavo import LLM, SamplingParams

    rows = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(TINY) if tiny else (MODELS / name / "config.json").read_text()
        Path(folder, "config.json").write_text(text)
        llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, device=device,
            max_model_len=2048 if tiny else 4352, max_num_seqs=32 if tiny else 512,
            max_num_batched_tokens=512 if tiny else 16384,
            **({"kv_cache_tokens": 32768} if tiny else {}),
        )  # fmt: skip
    rows.append({"model": name, "work": "start", "seconds": time.perf_counter() - start})
    draw = random.Random(7)
    with llm:
        for work, (ins, outs, temperature) in workloads(tiny).items():
            if time.perf_counter() - start > budget_s:
                break
            prompts = [[draw.randrange(1, 1000 if tiny else 10_000) for _ in range(n)] for n in ins]
            params = [
                SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True) for n in outs
            ]
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            rows.append(
                {
                    "model": name,
                    "work": work,
                    "seconds": seconds,
                    "output_tok_s": sum(outs) / seconds,
                    "input_tok_s": sum(ins) / seconds,
                }
            )
            print(rows[-1], flush=True)
        llm.audit()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds a model")
    args = parser.parse_args()
    report: dict[str, Any] = {"ids": compare_ids(args.device)}
    print(report, flush=True)
    report["rows"] = []
    for name in ("qwen3-0.6b", "llama3-8b"):
        report["rows"] += run_model(name, args.device, args.tiny, args.budget)
        (args.out / "gpu_engine.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
