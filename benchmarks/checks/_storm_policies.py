"""Whom the storm check compares: Octavo, the best fixed value, a baseline, a bad control."""

from __future__ import annotations

import random

from octavo.core.admission import AdmitWhatFits
from octavo.core.pacing import PrefillPace, Prompt
from octavo.core.pages import PagePool
from octavo.core.preemption import Preemption
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Sequence

PAGE_SIZE = 16
MIN_BATCHED_TOKENS = 2048
MAX_SEQS_RATIOS = (4, 16)  # max_num_seqs over what the pool holds
MAX_MODEL_LEN = 1 << 15


class Unpaced(PrefillPace):
    """Prompts take whatever a step has left."""

    def tokens(
        self, budget: int, rows: int, context: int, pressed: bool, oldest: Prompt | None = None
    ) -> int:
        return budget


class RandomVictim:
    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def __call__(self, running: list[Sequence]) -> Sequence:
        return self._draw.choice(running)


class Setting:
    """A pool for ``held`` requests of ``mean_tokens``, and a ceiling of sequences far above."""

    def __init__(self, held: int, mean_tokens: float, ratio: int) -> None:
        self.num_pages = round(held * mean_tokens / PAGE_SIZE) + 1
        self.held = held
        self.ratio = ratio

    def octavo(self) -> Scheduler:
        return self._scheduler()

    def fixed(self, factor: float) -> Scheduler:
        """So many requests at once, chosen with hindsight: ``factor`` times what the pool holds."""
        limit = max(1, round(factor * self.held))
        return self._plain(AdmitWhatFits(limit=limit))

    def baseline(self) -> Scheduler:
        """Admit when the prompt fits, preempt the newest."""
        return self._plain(AdmitWhatFits())

    def control(self, seed: int) -> Scheduler:
        """Preempt anyone, and compute everything anew."""
        return self._plain(AdmitWhatFits(), choose=RandomVictim(seed), prefix_caching=False)

    def _plain(self, admission: AdmitWhatFits, **policies: object) -> Scheduler:
        """Prompts are not paced, and a page that is missing is taken at once."""
        return self._scheduler(
            admission=admission, pace=Unpaced(), preemption=Preemption(patience=0), **policies
        )

    def _scheduler(self, **policies: object) -> Scheduler:
        widest = max(MAX_SEQS_RATIOS) * self.held
        return Scheduler(
            pool=PagePool(self.num_pages, PAGE_SIZE),
            max_num_seqs=self.ratio * self.held,
            max_num_batched_tokens=max(MIN_BATCHED_TOKENS, widest),
            max_model_len=MAX_MODEL_LEN,
            **policies,  # type: ignore[arg-type]
        )
