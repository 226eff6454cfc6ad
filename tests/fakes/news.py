"""A step's news row by row, for tests that do not care how it travels."""

from __future__ import annotations

from octavo.core.plan import Delta, StepOutput


def as_deltas(output: StepOutput) -> list[Delta]:
    """One delta for each request with news."""
    rows = zip(output.request_ids, output.tokens, strict=True)
    return [Delta(request_id, [token]) for request_id, token in rows] + output.deltas
