"""What keys and values in fp8 cost in quality and save in memory, on the embedded model.

Perplexity in bf16, the model's own type, with and without ``--kv-cache-dtype fp8``, over prompts of
1,024 tokens from Python's own reference (``pydoc_data.topics``, which each Python has). All tokens
of a prompt read each other's keys and values from the pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pydoc_data.topics import topics

from benchmarks.check import Check
from octavo import LLM, SamplingParams

NUM_PROMPTS, PROMPT_TOKENS = 16, 1024
MOST_LOST = 1.005  # perplexity in fp8 over that without
LEAST_SAVED = 1.9  # tokens that the same memory keeps, over those in bf16


def run(check: Check) -> None:
    plain, small = (_perplexities(kind) for kind in ("auto", "fp8"))
    ratios = [b / a for a, b in zip(plain, small, strict=True)]
    check.notes["perplexity"] = _mean(plain)
    check.line("perplexity in fp8 / perplexity", _mean(ratios), "<=", MOST_LOST, ratios)
    tokens = [_tokens(kind) for kind in ("auto", "fp8")]
    check.line("tokens in fp8 / tokens in bf16", tokens[1] / tokens[0], ">=", LEAST_SAVED, tokens)


def _mean(values: Sequence[float]) -> float:
    """Geometric: the mean log-probability."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _open(kind: str) -> LLM:
    return LLM(dtype="bfloat16", kv_cache_dtype=kind, kv_cache_memory="256MiB", max_model_len=2048)


def _tokens(kind: str) -> int:
    with _open(kind) as llm:
        return llm.config.kv_cache_tokens


def _perplexities(kind: str) -> list[float]:
    """Of each prompt; prompts are spread over the whole text."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    with _open(kind) as llm:
        text = "\n\n".join(topics[name] for name in sorted(topics))
        ids = llm.get_tokenizer().encode(text)
        stride = len(ids) // NUM_PROMPTS
        starts = range(0, stride * NUM_PROMPTS, stride)
        prompts = [ids[start : start + PROMPT_TOKENS] for start in starts]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    found = []
    for prompt, output in zip(prompts, outputs, strict=True):
        entries = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        mean = sum(entry[token].logprob for token, entry in entries) / (len(prompt) - 1)
        found.append(math.exp(-mean))
    return found
