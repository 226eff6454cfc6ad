"""Greedy ids equal transformers' on the same weights in fp32.

A difference is forgiven only where the reference's own two best logits are closer than 1e-4;
from there on the two texts are different texts, so the comparison of that prompt ends.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.check import Check
from benchmarks.checks._reference import load_transformers

NEW_TOKENS = 64
TIE = 1e-4
SEEDS = (
    "def fibonacci(n):\n    a, b = 0, 1\n    while n:\n        a, b, n = b, a + b, n - 1\n",
    "从前有一座山,山上有一座庙,庙里有一个老和尚在讲故事。",
    "The weather 🌦️ today is 😀 and tomorrow 🚀🚀 we fly to the moon 🌕. ",
    "The quick brown fox jumps over the lazy dog. ",
    "SELECT name, count(*) FROM orders WHERE total > 100 GROUP BY name ORDER BY 2 DESC;\n",
)
LENGTHS = (5, 17, 33, 64, 100, 150, 200, 256, 300, 400, *range(500, 1200, 100), 1250, 1400, 1500)


def prompts() -> list[list[int]]:
    """20 prompts of 5 to 1,500 ids: code, Chinese, emoji, prose, SQL."""
    from octavo.text.tokenizer import load_tokenizer
    from octavo.weights.locate import locate

    tokenizer = load_tokenizer(locate(None).path)
    made = []
    for index, length in enumerate(LENGTHS):
        seed = SEEDS[index % len(SEEDS)]
        text = "".join(f"{seed}({index}.{turn}) " for turn in range(length // 8 + 1))
        made.append(tokenizer.encode(text)[:length])
    return made


def measure(check: Check) -> None:
    from octavo import LLM, SamplingParams

    texts = prompts()
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(dtype="float32", kv_cache_tokens=32768) as llm:
        outputs = llm.generate(texts, params, use_tqdm=False)
    model = load_transformers(torch.float32)
    verdicts = [
        _compare(model, prompt, output.outputs[0].token_ids)
        for prompt, output in zip(texts, outputs, strict=True)
    ]
    check.note(forgiven_ties=sum(verdict == "tie" for verdict in verdicts))
    equal = sum(verdict != "different" for verdict in verdicts)
    check.line("greedy_ids_equal_of_20", equal, "==", len(texts), raw=verdicts)


@torch.inference_mode()
def _compare(model: Any, prompt: list[int], ids: list[int]) -> str:
    """ "equal", "tie" (they part at a tie of the reference) or "different".

    One pass over prompt and answer gives the reference's choice after each of our ids; up to the
    first difference that is what greedy decoding would have seen.
    """
    logits = model(torch.tensor([prompt + ids[:-1]])).logits[0, len(prompt) - 1 :]
    if len(ids) != NEW_TOKENS:
        return "different"
    best = logits.topk(2)
    for step, token in enumerate(ids):
        if token != int(best.indices[step, 0]):
            gap = float(best.values[step, 0] - best.values[step, 1])
            return "tie" if gap < TIE else "different"
    return "equal"
