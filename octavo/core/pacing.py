"""Pacing: how much of a step prompts may take, so that answers keep flowing."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.steptime import StepTimeFit

# Beside answers under way, prompts take so many tokens of a step (still efficient on a GPU), or so
# many for each answer, so that a step is at most a few times as long as one without prompts.
TOKENS_BESIDE = 2048
TOKENS_BESIDE_EACH = 4
STEADY_SHARE = 3.0  # of the prefill that a steady state needs: what prompts get under pressure
MEMORY_STEPS = 256  # over which that need is measured
FIRST_CHUNK = 64  # tokens a step, where there is an ITL target and the time of steps is not known
LEAST_CHUNK = 16  # tokens a step that prompts always get: they must not starve either
MARGIN = 1.2  # on the predicted time of a prompt: its later slices have more to read


@dataclass(frozen=True, slots=True)
class Prompt:
    """One under way, whose request has no token yet."""

    id: str  # of the request
    waited: float  # seconds since that arrived
    left: int  # tokens to compute


class PrefillPace:
    """Prompt tokens for the next step, beside its decode rows.

    While anybody decodes they are bounded, so that a full queue does not stall the answers. Under
    *pressure* (somebody waits for pages) requests can start only as others end, so prompts need no
    more than their steady rate; a little above it they arrive in time, and no step is much longer
    than the others. ``target_itl`` seconds bound the predicted step, whatever the pressure.
    ``target_ttft`` seconds lift the bound of pressure, and no other, for the oldest prompt under
    way: once it would come too late at the steady rate, and then until its first token. One that is
    too late before it begins is not hurried: in an overload that would be all of them.
    """

    def __init__(
        self, *, target_itl: float | None = None, target_ttft: float | None = None
    ) -> None:
        self.step_time = StepTimeFit()
        self._target_itl = target_itl
        self._target_ttft = target_ttft
        self._hurried = ""  # id of the latest prompt that was
        self._sum = self._weight = 0.0  # of prefill tokens, and of steps; both forget

    def tokens(
        self, budget: int, rows: int, context: int, pressed: bool, oldest: Prompt | None = None
    ) -> int:
        """At most ``budget`` tokens beside ``rows`` decodes that read ``context`` tokens.

        ``oldest`` is the oldest prompt under way, if there is any.
        """
        if not rows:
            return budget
        budget = min(budget, max(TOKENS_BESIDE, TOKENS_BESIDE_EACH * rows))
        if pressed:
            share = max(LEAST_CHUNK, int(STEADY_SHARE * self.need))
            if oldest is not None and self._must_hurry(oldest, share, rows, context):
                share = max(share, oldest.left)
            budget = min(budget, share)
        if self._target_itl is not None:
            budget = min(budget, max(LEAST_CHUNK, self._within(self._target_itl, rows, context)))
        return budget

    def _within(self, seconds: float, rows: int, context: int) -> int:
        """Prompt tokens of a step that takes ``seconds``; few, while nothing is known of steps."""
        if not self.step_time.ready:
            return FIRST_CHUNK
        return self.step_time.prefill_tokens_within(seconds, rows, context)

    def _must_hurry(self, prompt: Prompt, rate: int, rows: int, context: int) -> bool:
        """Whether at ``rate`` tokens a step it misses the target, which it has not done yet."""
        if self._target_ttft is None or not self.step_time.ready:
            return False
        if prompt.id != self._hurried:
            seconds = prompt.left / rate * self.step_time.predict(rate, rows, context)
            if not 0 < self._target_ttft - prompt.waited < MARGIN * seconds:
                return False
            self._hurried = prompt.id
        return True

    @property
    def need(self) -> float:
        """Prefill tokens a step, in the mean of late."""
        return self._sum / self._weight if self._weight else 0.0

    def observe(self, prefill: int, rows: int, context: int, seconds: float) -> None:
        """A step has taken ``seconds``."""
        keep = 1 - 1 / MEMORY_STEPS
        self._sum, self._weight = keep * self._sum + prefill, keep * self._weight + 1
        if seconds > 0:
            self.step_time.observe(prefill, rows, context, seconds)
