"""Log-probabilities of a step, brought to the requests that asked for them."""

from __future__ import annotations

from octavo.core.flight import Flight
from octavo.core.plan import Delta, StepOutput, StepResult


def add_logprobs(flight: Flight, result: StepResult, output: StepOutput) -> None:
    """Add those of ``result`` to ``output``. Requests that have some are told by a delta, whatever
    else they have to say."""
    by_slot = dict(zip(flight.plan.slots, flight.seqs, strict=True))
    by_id = {delta.id: delta for delta in output.deltas}
    wanted = {by_slot[slot].id for slot in result.logprobs}
    wanted |= {by_slot[part.slot].id for part in result.prompt_logprobs}
    for request_id, token in _take_out(output, wanted):
        by_id[request_id] = Delta(request_id, [token])
        output.deltas.append(by_id[request_id])
    for slot, logprobs in result.logprobs.items():
        delta = by_id.get(by_slot[slot].id)
        if delta is not None:
            delta.logprobs = logprobs
    for part in result.prompt_logprobs:
        seq = by_slot[part.slot]
        entries = part.entries[max(0, seq.next_prompt_logprob - part.start) :]
        if not entries or (seq.slot < 0 and seq.id not in by_id):
            continue
        if seq.id not in by_id:
            by_id[seq.id] = seq.delta([])
            output.deltas.append(by_id[seq.id])
        by_id[seq.id].prompt_logprobs.extend(entries)
        seq.next_prompt_logprob += len(entries)


def _take_out(output: StepOutput, wanted: set[str]) -> list[tuple[str, int]]:
    """Remove the rows of these requests from the columns, and return them."""
    rows = list(zip(output.request_ids, output.tokens, strict=True))
    output.request_ids = [name for name, _ in rows if name not in wanted]
    output.tokens = [token for name, token in rows if name not in wanted]
    return [row for row in rows if row[0] in wanted]
