"""Pacing: how much of a step prompts may take, so that answers keep flowing."""

from __future__ import annotations

from octavo.core.steptime import StepTimeFit

STEADY_SHARE = 3.0  # of the prefill that a steady state needs: what prompts get under pressure
MEMORY_STEPS = 256  # over which that need is measured
LEAST_CHUNK = 16  # tokens a step that prompts always get: they must not starve either
URGENT = 0.5  # share of the TTFT target that the head of the queue may wait before prompts go first


class PrefillPace:
    """Prompt tokens for the next step, beside its decode rows.

    Under *pressure* (somebody waits for pages) requests can start only as others end, so prompts
    need no more than their steady rate; a little above it they arrive in time, and no step is much
    longer than the others. ``target_itl`` seconds bound the predicted step, whatever the pressure.
    ``target_ttft`` seconds lift the first bound, never the second, while the oldest request
    without a token has waited for more than half of them, and can still be in time.
    """

    def __init__(
        self, *, target_itl: float | None = None, target_ttft: float | None = None
    ) -> None:
        self.step_time = StepTimeFit()
        self._target_itl = target_itl
        self._target_ttft = target_ttft
        self._sum = self._weight = 0.0  # of prefill tokens, and of steps; both forget

    def tokens(self, budget: int, rows: int, context: int, pressed: bool, waited: float) -> int:
        """At most ``budget`` tokens beside ``rows`` decodes that read ``context`` tokens.

        ``waited`` are the seconds since the oldest request without a token arrived.
        """
        if not rows:
            return budget
        if pressed and not self._is_urgent(waited):
            budget = min(budget, max(LEAST_CHUNK, int(STEADY_SHARE * self.need)))
        if self._target_itl is not None and self.step_time.ready:
            within = self.step_time.prefill_tokens_within(self._target_itl, rows, context)
            budget = min(budget, max(LEAST_CHUNK, within))
        return budget

    def _is_urgent(self, waited: float) -> bool:
        """Past the target it is missed: others need not suffer any more."""
        target = self._target_ttft
        return target is not None and URGENT * target < waited <= target

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
