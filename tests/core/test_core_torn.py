"""A plan or a result that was cut short anywhere: the scheduler starts afresh and serves on."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.flight import Flight
from octavo.core.forecast import Forecast
from octavo.core.kvcache import KVCache
from octavo.core.scheduler import Scheduler
from tests.fakes.loop import SchedulerLoop, expected, ids_of, make_loop, request

PLACES = [
    (Flight, "add"),
    (Flight, "sampled"),
    (KVCache, "quote"),
    (KVCache, "begin"),
    (KVCache, "grow"),
    (KVCache, "settle"),
    (KVCache, "release"),
    (Forecast, "admits"),
    (Forecast, "joined"),
    (Forecast, "grew"),
    (Forecast, "left"),
    (Scheduler, "_enter"),
    (Scheduler, "_look"),
    (Scheduler, "_vacate"),
    (Scheduler, "_sweep"),
]


class Torn(Exception):
    pass


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[name for _, name in PLACES])
@pytest.mark.parametrize("calls", [1, 4])
def test_what_was_cut_short_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, calls: int
) -> None:
    """At the ``calls``-th call of that function, after it has done its work."""
    loop = make_loop(pages=24, seqs=4, tokens=16)
    loop.submit(*(request(str(index), 9, 3 + index) for index in range(6)))
    real = getattr(owner, name)
    left = calls

    def torn(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        value = real(self, *args, **kwargs)
        left -= 1
        if not left:
            raise Torn
        return value

    monkeypatch.setattr(owner, name, torn)
    with pytest.raises(Torn):
        loop.run()
    loop.scheduler.forget_all()
    loop.scheduler.audit()
    serve_on(loop)


def serve_on(loop: SchedulerLoop) -> None:
    """The workers forget too."""
    afresh = make_loop(pages=24, seqs=4, tokens=16)
    afresh.scheduler = loop.scheduler
    requests = [request(f"again {index}", 9, 8) for index in range(6)]
    afresh.submit(*requests)
    assert ids_of(afresh.run()) == {r.id: expected(r) for r in requests}
