"""Pages that no later query sees are free while the sequence still runs: counted, step by step."""

from __future__ import annotations

import pytest

from octavo.core.pages import NULL_PAGE, BlockSpec
from octavo.core.request import Request
from tests.fakes.loop import AdmitAll, expected, make_loop, request

PAGE = 4


def visible_pages(computed: int, window: int) -> int:
    """Pages of ``computed`` tokens that the query after them sees, or is written to."""
    first = max(0, computed + 1 - window) // PAGE if window else 0
    return -(-computed // PAGE) - first


@pytest.mark.parametrize("windows", [(6,), (0, 6), (9, 0, 9)])
def test_a_running_sequence_holds_what_it_sees(windows: tuple[int, ...]) -> None:
    loop = make_loop(blocks=tuple(BlockSpec(window=w) for w in windows), tokens=8)
    loop.submit(request("a", 30, 60))
    lengths = []
    while loop.scheduler.has_work:
        loop.step()
        if not loop.scheduler.has_work:
            break
        (seq,) = loop.scheduler._running
        computed = seq.scheduled
        lengths.append(computed)
        for table, window in zip(seq.tables, windows, strict=True):
            held = len(table) - table.count(NULL_PAGE)
            # What has left the window since its last page was filled goes with the next one.
            assert held <= visible_pages(computed - computed % PAGE, window) + 1
        assert loop.scheduler.stats().pages_referenced == sum(
            len(table) - table.count(NULL_PAGE) for table in seq.tables
        )
    assert max(lengths) == 30 + 60 - 2  # the step that ends it is not looked at


def test_freed_pages_serve_others_while_their_first_owner_runs() -> None:
    """Ten pages: too few for either sequence without its window, enough for both with it."""
    loop = make_loop(blocks=(BlockSpec(window=6),), pages=10, tokens=8, admission=AdmitAll())
    requests = [request("a", 30, 60), Request("b", list(range(30)), 60)]
    loop.submit(*requests)
    outputs = loop.run()
    assert {name: output.ids for name, output in outputs.items()} == {
        r.id: expected(r) for r in requests
    }
    assert max(len(plan.slots) for plan in loop.history) == 2
    assert loop.scheduler.stats().preemptions == 0
