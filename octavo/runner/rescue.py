"""A step that runs out of memory costs its own requests, not the engine."""

from __future__ import annotations

import logging

import torch

from octavo.core.plan import Fault, StepPlan, StepResult

log = logging.getLogger("octavo.engine")


def out_of_memory(plan: StepPlan, error: Exception) -> StepResult | None:
    """The result of a plan that ``error`` ended: every row a fault; None: it is another error.

    The rows' pages hold nothing, and leave with their requests. Plans launched earlier are not
    touched: their memory was taken when they were.
    """
    if not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return None
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what the step got before it failed, in pieces of its own sizes
    tokens = plan.num_tokens
    reason = str(error).partition("\n")[0]
    log.error(
        "Step %d (%d requests, %d tokens) ran out of memory; its requests end: %s",
        plan.step, len(plan.slots), tokens, reason,
    )  # fmt: skip
    message = (
        f"The engine ran out of memory in a step of {tokens} tokens that this request had a part "
        "in; it may be sent again."
    )
    return StepResult(
        plan.step, faults=[Fault(slot, "out_of_memory", message) for slot in plan.slots]
    )
