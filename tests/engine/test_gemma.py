"""Gemma 3 270M end to end: sliding and full layers in one cache, contexts past the window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core.errors import InvalidRequest
from tests.fakes.gemma import fetch_gemma

pytestmark = pytest.mark.slow

WINDOW, NEW_TOKENS = 512, 16
TIE = 1e-4  # where the reference's own two best logits are closer, either may be chosen
STORY = "In the {0}th house of the street lived a baker who sold {1} loaves on day {0}. "
SENTENCEPIECE = {
    "  two   spaces\n\n\ttab 123 émoji 🌦️ 从前": (
        "138 13498 139 35220 108 255968 4823 236743 236770 236778 236800 1559 58197 236743 250759 "
        "238178 74937 237378"
    ),
    "    for i in range(10):\n        print(i)": (
        "140 1708 858 528 2644 236769 236770 236771 1473 107 144 1995 236769 236747 236768"
    ),
    "<table><tr> x</tr>\n\n\n𒀀 \x7f": "168 173 1123 181 109 247364 236743 251541",
}
CODE = "def area_{0}(width, height={1}):\n    return width * height + {0}\n\n\n"


@pytest.fixture(scope="module")
def gemma() -> Path:
    return fetch_gemma()


@pytest.fixture(scope="module")
def llm(gemma: Path) -> Iterator[LLM]:
    """Chunks are smaller than the window, contexts up to four times as long."""
    options: dict[str, Any] = {"max_num_batched_tokens": 200, "max_num_seqs": 8, "cpu_threads": 1}
    with LLM(str(gemma), dtype="float32", max_model_len=2048, **options) as llm:
        yield llm
        llm.audit()


def prompts(llm: LLM) -> list[list[int]]:
    """Short, longer than the window, and one that begins as the second does."""
    story, code = (
        llm.get_tokenizer().encode("".join(text.format(i, i * i % 97) for i in range(90)))
        for text in (STORY, CODE)
    )
    return [story[:40], story[:700], story[:660] + code[1:40], code[:1301]]


def test_a_question(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    (output,) = llm.generate("Q: What is the capital of France?\nA:", params, use_tqdm=False)
    assert output.outputs[0].text == " The capital of France is Paris.\n"


def test_ids_of_a_text_are_those_of_sentencepiece(llm: LLM) -> None:
    """As the sentencepiece package 0.2.3 gives them for the file's vocabulary, scores and types."""
    tokenizer = llm.get_tokenizer()
    for text, known in SENTENCEPIECE.items():
        ids = [int(token) for token in known.split()]
        assert tokenizer.encode(text) == [2, *ids]
        assert tokenizer.decode(ids) == text


def test_a_base_model_does_not_chat(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="This model has no chat template"):
        llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)


def test_ids_are_those_of_transformers(llm: LLM, gemma: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    texts = prompts(llm)
    first = llm.generate(texts, params, use_tqdm=False)
    again = llm.generate(texts, params, use_tqdm=False)
    hits = [output.num_cached_tokens or 0 for output in again]
    assert hits == [32, 688, 688, 1296], "all full pages of a prompt but the last token's"
    model = transformers_model(gemma)
    for prompt, *outputs in zip(texts, first, again, strict=True):
        assert len(prompt) < 100 or len(prompt) > WINDOW
        for ids in {tuple(output.outputs[0].token_ids) for output in outputs}:
            assert_greedy(model, prompt, list(ids))


def transformers_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM, GgufConfig

    return AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()


@torch.inference_mode()
def assert_greedy(model: Any, prompt: list[int], ids: list[int]) -> None:
    """One pass over prompt and answer gives the reference's choice after each of our ids."""
    assert len(ids) == NEW_TOKENS
    tokens = torch.tensor([prompt + ids[:-1]])
    logits = model(tokens, logits_to_keep=NEW_TOKENS).logits[0]
    best = logits.topk(2)
    for step, token in enumerate(ids):
        if token != int(best.indices[step, 0]):
            gap = float(best.values[step, 0] - best.values[step, 1])
            assert gap < TIE, f"step {step}: {token}, not {int(best.indices[step, 0])}"
            return
