"""Recordings as input of the simulator: what was asked for, what it took, how fast it went."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.config.load import OptionError
from octavo.core.steptime import StepTime, fit_step_time
from octavo.engine.record import Ended, Start, Step, read_recording
from octavo.tools.simulate.trace import Trace

MIN_STEPS = 8  # for a fit


@dataclass(frozen=True, slots=True)
class Recording:
    """What an engine wrote with ``--trace-file``."""

    path: str
    start: Start
    steps: list[Step]
    ended: list[Ended]  # by arrival; those that got at least one token

    def trace(self) -> Trace:
        """The same requests at the same times, from the first one on."""
        ended = self.ended
        if not ended:
            raise OptionError(f"{self.path} records no request that got an answer.")
        arrival = np.array([entry.arrival for entry in ended])
        return Trace(
            arrival=arrival - arrival[0],
            prompt=np.array([entry.prompt for entry in ended]),
            output=np.array([entry.output for entry in ended]),
            max_tokens=np.array([entry.max_tokens for entry in ended]),
            shared=np.array([entry.cached for entry in ended]),
            tenant=[str(entry.tenant) for entry in ended],
            priority=[entry.priority for entry in ended],
        )

    def fit(self) -> StepTime:
        """Coefficients that explain the steps' times best."""
        steps = [
            (step.prefill_tokens, step.decode_rows, step.context_tokens, step.seconds)
            for step in self.steps
            if step.seconds > 0
        ]
        if len(steps) < MIN_STEPS:
            raise OptionError(
                f"{self.path} records {len(steps)} steps; a fit needs at least {MIN_STEPS}."
            )
        return fit_step_time(steps)

    @property
    def output_rate(self) -> float:
        """Tokens a second of the requests that ended, from the first step to the last end. What
        other requests got is not known. Raises :class:`OptionError` if that is no time at all."""
        if not self.steps:
            raise OptionError(f"{self.path} records no steps, and so no rate to compare with.")
        seconds = self._last_end - self.steps[0].start
        if seconds <= 0:
            raise OptionError(f"{self.path} records no time between its first step and last end.")
        return sum(entry.output for entry in self.ended) / seconds

    @property
    def num_steps_left_out(self) -> int:
        """Steps for requests whose end was not recorded: the recording was cut."""
        return sum(step.start >= self._last_end for step in self.steps)

    @property
    def share_of_rows_left_out(self) -> float:
        """Of the decode rows before those steps, those of the same requests."""
        rows = sum(step.decode_rows for step in self.steps if step.start < self._last_end)
        counted = sum(entry.output - 1 for entry in self.ended)  # a prefill gives the first token
        return max(0.0, 1 - counted / rows) if rows else 0.0

    @property
    def _last_end(self) -> float:
        return max(entry.end for entry in self.ended)


def load_recording(path: str) -> Recording:
    """Raises :class:`OptionError` if the file is not a recording."""
    try:
        entries = list(read_recording(Path(path)))
    except OSError as error:
        raise OptionError(f"Cannot read {path}: {error.strerror}.") from None
    except ValueError as error:
        raise OptionError(f"{path} is not a recording by --trace-file: {error}.") from None
    start = entries[0]
    assert isinstance(start, Start)
    ended = [entry for entry in entries if isinstance(entry, Ended) and entry.output > 0]
    ended.sort(key=lambda entry: entry.arrival)
    return Recording(path, start, [e for e in entries if isinstance(e, Step)], ended)
