"""What a measurement asks for: prompts, output lengths, and when each request arrives."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from octavo.config.load import OptionError
from octavo.tools.bench.named import NAMED, Named

DATASETS = ("random", "jsonl", "lengths", *NAMED)
DEFAULT_NUM_PROMPTS = 100
T = TypeVar("T")
# Common short words: one token each in most vocabularies.
WORDS = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work number night
point home water room mother area money story fact month lot right study book eye job word
""".split()  # noqa: SIM905 - a list would take fifty lines


@dataclass(frozen=True, slots=True)
class Task:
    """One request: its prompt (text or token ids) and how many tokens to generate."""

    prompt: str | list[int]
    output_len: int

    @property
    def text(self) -> str:
        """The prompt, or for ids about as many words."""
        if isinstance(self.prompt, str):
            return self.prompt
        return " ".join(WORDS[token % len(WORDS)] for token in self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """``num_prompts`` None: all of a JSONL file or named workload, else 100. Random lengths lie
    within ±``range_ratio`` of the given ones; random ids within the last 7/8 of ``vocab_size``,
    where few vocabularies have special tokens. ``request_rate`` (1/s) None: all at once, or the
    named workload's own arrivals."""

    dataset: str = "random"
    path: str | None = None
    num_prompts: int | None = None
    input_len: int = 512
    output_len: int = 128
    range_ratio: float = 0.0
    vocab_size: int = 32_000
    seed: int = 0
    request_rate: float | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None

    def tasks(self, repetition: int = 0, side: int = 0) -> list[Task]:
        """The requests of a repetition. Ids differ from one to the next, so that no prefix cache
        helps; the two sides of a comparison differ in ids, not in lengths. A JSONL file stays as
        it is. Raises :class:`OptionError`."""
        draw = random.Random(f"{self.seed}/{repetition}")
        if self.dataset == "jsonl":
            return self._from_file()
        count = DEFAULT_NUM_PROMPTS if self.num_prompts is None else self.num_prompts
        if self.dataset in NAMED:
            lengths = list(self._named(repetition).lengths)
            lengths = self._first(lengths, self.dataset)
        elif self.dataset == "lengths":
            lengths = list(drawn_lengths(read_lengths(self._path), count, draw))
        else:
            lengths = [
                (self._spread(self.input_len, draw), self._spread(self.output_len, draw))
                for _ in range(count)
            ]
        draw = random.Random(f"{self.seed}/{repetition}/{side}/ids")
        ids = range(self.vocab_size // 8, self.vocab_size)
        return [
            Task(draw.choices(ids, k=num_input), num_output) for num_input, num_output in lengths
        ]

    def arrivals(self, count: int, repetition: int = 0) -> list[float]:
        """Seconds after the start at which each request is due."""
        if self.dataset in NAMED and (due := self._named(repetition).due_s) is not None:
            return list(due)[:count]
        draw = random.Random(f"{self.seed}/{repetition}/arrivals")
        return arrival_times(count, self.request_rate, self.burstiness, draw)

    @property
    def has_lengths(self) -> bool:
        """True if output lengths are part of what is measured, not just bounds."""
        return self.dataset != "jsonl"

    def described(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def _path(self) -> Path:
        if self.path is None:
            raise OptionError(f"--dataset-name {self.dataset} needs --dataset-path.")
        return Path(self.path)

    def _from_file(self) -> list[Task]:
        return self._first(read_jsonl(self._path, self.output_len), str(self.path))

    def _first(self, found: list[T], where: str) -> list[T]:
        """As many as asked for, or all."""
        count = len(found) if self.num_prompts is None else self.num_prompts
        if count > len(found):
            raise OptionError(
                f"--num-prompts must be at most {len(found)}, the prompts in {where}, not {count}."
            )
        return found[:count]

    def _named(self, repetition: int) -> Named:
        return NAMED[self.dataset](random.Random(f"{self.seed}/{repetition}"))

    def _spread(self, length: int, draw: random.Random) -> int:
        low = math.floor(length * (1 - self.range_ratio))
        high = math.ceil(length * (1 + self.range_ratio))
        return draw.randint(max(1, low), max(1, high))


def arrival_times(
    count: int, rate: float | None, burstiness: float, draw: random.Random
) -> list[float]:
    """Gamma-distributed gaps with mean 1/``rate``: ``burstiness`` 1 is a Poisson process, below 1
    comes in bursts, above 1 is more even."""
    if rate is None:
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += draw.gammavariate(burstiness, 1 / (rate * burstiness))
    return times


def read_jsonl(path: Path, default_output_len: int) -> list[Task]:
    """Lines {"prompt": text or ids, "output_len": n}; without a length, the default one."""
    tasks = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError:
            raise OptionError(f"{where} is not JSON.") from None
        prompt = row.get("prompt") if isinstance(row, dict) else None
        is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not prompt or not (isinstance(prompt, str) or is_ids):
            raise OptionError(f'{where} must have "prompt", a text or a list of token ids.')
        length = row.get("output_len", default_output_len)
        if type(length) is not int or length < 1:
            raise OptionError(f"{where}: output_len must be a whole number ≥ 1, not {length!r}.")
        tasks.append(Task(prompt, length))
    if not tasks:
        raise OptionError(f"{path} holds no prompt.")
    return tasks


def read_lengths(path: Path) -> list[tuple[int, int, float]]:
    """Rows (input length, output length, weight) of a JSON list of lists or of a CSV file, where a
    first line of names may stand. Without a third column every row weighs the same."""
    if path.suffix == ".json":
        try:
            rows = json.loads(_text(path))
        except ValueError:
            raise OptionError(f"{path} is not JSON.") from None
    else:
        rows = [row for row in csv.reader(_text(path).splitlines()) if row]
        if rows and not rows[0][0].strip().isdigit():
            rows = rows[1:]
    if not isinstance(rows, list) or not rows:
        raise OptionError(f"{path} must be a list of [input, output] or [input, output, weight].")
    return [_length_row(path, row) for row in rows]


def _length_row(path: Path, row: Any) -> tuple[int, int, float]:
    try:
        num_input, num_output = int(row[0]), int(row[1])
        weight = float(row[2]) if len(row) > 2 else 1.0
    except (TypeError, ValueError, IndexError, KeyError):
        num_input, num_output, weight = 0, 0, 0.0
    if num_input < 1 or num_output < 1 or not 0 < weight < math.inf:
        raise OptionError(
            f"{path}: a row must be input ≥ 1, output ≥ 1 and, if given, a weight > 0, not {row!r}."
        )
    return num_input, num_output, weight


def drawn_lengths(
    rows: Sequence[tuple[int, int, float]], count: int, draw: random.Random
) -> Iterator[tuple[int, int]]:
    weights = [weight for _, _, weight in rows]
    for num_input, num_output, _ in draw.choices(rows, weights, k=count):
        yield num_input, num_output


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise OptionError(f"Cannot read {path}: {reason}.") from None
