"""StageBar: how far a start is, for whoever waits for it at a terminal."""

from __future__ import annotations

import sys
from typing import Any


class StageBar:
    """One bar, for the stage under way; gone when closed. Without a terminal, nothing is shown."""

    def __init__(self) -> None:
        from tqdm import tqdm

        shown = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}"
        self._bar: Any = tqdm(
            total=1.0, file=sys.stderr, disable=None, leave=False, bar_format=shown
        )

    def show(self, stage: str, share: float) -> None:
        """``share`` of ``stage``, 0 to 1, is done."""
        self._bar.set_description_str(stage, refresh=False)
        self._bar.n = share
        self._bar.refresh()

    def __enter__(self) -> StageBar:
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.close()
