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
    without a token has waited for more than half of them.
    """

    def __init__(
        self, *, target_itl: float | None = None, target_ttft: float | None = None
    ) -> None:
        self.step_time = StepTimeFit()
        self._target_itl = target_itl
        self._target_ttft = target_ttft
        self._need = 0.0  # prefill tokens a step, running mean

    def tokens(self, budget: int, rows: int, context: int, pressed: bool, waited: float) -> int:
        """At most ``budget`` tokens beside ``rows`` decodes that read ``context`` tokens.

        ``waited`` are the seconds since the oldest request without a token arrived.
        """
        if not rows:
            return budget
        urgent = self._target_ttft is not None and waited > URGENT * self._target_ttft
        if pressed and not urgent:
            budget = min(budget, max(LEAST_CHUNK, int(STEADY_SHARE * self._need)))
        if self._target_itl is not None and self.step_time.ready:
            within = self.step_time.prefill_tokens_within(self._target_itl, rows, context)
            budget = min(budget, max(LEAST_CHUNK, within))
        return budget

    def observe(self, prefill: int, rows: int, context: int, seconds: float) -> None:
        """A step has taken ``seconds``."""
        self._need += (prefill - self._need) / MEMORY_STEPS
        if seconds > 0:
            self.step_time.observe(prefill, rows, context, seconds)
