"""Simulator: drives a scheduler through a trace on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from octavo.core.plan import Delta
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.tools.simulate.cost import CostModel
from octavo.tools.simulate.ledger import STOP, Ledger
from octavo.tools.simulate.outcome import Outcome
from octavo.tools.simulate.trace import Trace

_STOP_IDS = frozenset([STOP])


class Simulator:
    """The engine's loop at depth 1, with a cost model in place of the model.

    A request's answer ends at the length that the trace says. The scheduler must be idle, and
    have an empty prefix cache. Prompts share what the trace says, and nothing else.
    """

    def __init__(self, scheduler: Scheduler, cost: CostModel) -> None:
        self.scheduler = scheduler
        self.cost = cost

    def run(self, trace: Trace, progress: Callable[[int], None] | None = None) -> Outcome:
        """Serve ``trace`` until nothing is left to do. ``progress`` is told how many requests have
        ended, now and then. Raises RuntimeError if the scheduler comes to a standstill.
        """
        scheduler, pool, cost = self.scheduler, self.scheduler.pool, self.cost
        ledger = Ledger(trace, scheduler.max_num_seqs)
        arrivals = trace.arrival.tolist()
        requests = self._requests(trace)
        num_submitted, now = 0, 0.0
        while True:
            while num_submitted < len(arrivals) and arrivals[num_submitted] <= now:
                request = next(requests)
                delta = scheduler.submit(request, arrivals[num_submitted])
                num_submitted += 1
                if delta is not None:
                    _note_ends(ledger, [delta])
            _note_ends(ledger, scheduler.expire(now))
            plan = scheduler.plan(now)
            if plan.is_empty:
                if num_submitted < len(arrivals):
                    now = arrivals[num_submitted]
                    continue
                if scheduler.has_work:
                    raise RuntimeError(f"{scheduler.stats().waiting} requests wait for ever")
                return ledger.outcome(pool.num_usable)
            result = ledger.answer(plan)
            seconds = cost.seconds(*ledger.charge(plan))
            ledger.clock(now, seconds, pool.num_referenced)
            now += seconds
            num_ended = ledger.num_ended
            news = scheduler.apply(result, now)
            _note_ends(ledger, news.deltas)
            if progress is not None and ledger.num_ended > num_ended:
                progress(ledger.num_ended)

    def _requests(self, trace: Trace) -> Iterator[Request]:
        """Requests of the trace's lengths. A page's hash is its index and, if no other request has
        it, the request's number."""
        page_size = self.scheduler.pool.layout.page_size
        shared = [0] * len(trace) if trace.shared is None else trace.shared.tolist()
        lengths = zip(trace.prompt.tolist(), trace.max_tokens.tolist(), shared, strict=True)
        for number, (prompt_len, max_tokens, common) in enumerate(lengths):
            own, first_own = (number + 1) << 32, common // page_size
            yield Request(
                str(number),
                [number] + [0] * (prompt_len - 1),
                max_tokens=max_tokens,
                stop_ids=_STOP_IDS,
                block_hashes=tuple(
                    [
                        (page if page < first_own else own + page).to_bytes(8)
                        for page in range(prompt_len // page_size)
                    ]
                ),
                tenant=trace.tenant[number] if trace.tenant else "",
                priority=trace.priority[number] if trace.priority else 0,
                timeout=trace.timeout,
                queue_timeout=trace.queue_timeout,
            )


def _note_ends(ledger: Ledger, deltas: list[Delta]) -> None:
    for delta in deltas:
        if delta.finish is not None:
            ledger.ended(int(delta.id), delta.finish)
