"""The wall of a device's time line goes to kernels and gaps, each moment once."""

import pytest

from benchmarks.gpu_timeline import describe, walls


def test_a_kernel_that_waits_for_its_predecessor_gets_what_comes_after_it() -> None:
    by_name, gaps = walls([(0, 10, "a"), (2, 15, "b"), (18, 20, "a"), (19, 19.5, "c")])
    assert by_name == {"a": 10 + 1.5, "b": 5, "c": 0.5}
    assert gaps == [(3, "b", "a")]


def test_walls_and_gaps_add_up_to_the_span() -> None:
    kernels = [(0.0, 400.0, "a"), (600.0, 900.0, "b"), (650.0, 1000.0, "a")]
    found = describe(kernels, steps=2)
    assert found["span_ms"] == pytest.approx(1.0)
    assert found["idle_share"] == pytest.approx(0.2)
    assert found["gaps"]["count and ms"]["over 100 us"] == [1, 0.2]
    assert found["gaps"]["count and ms"]["over 1000 us"] == [0, 0]
    a, b = found["kernels"]
    assert (a["name"], a["wall_ms_a_step"], a["duration_us"], a["a_step"]) == ("a", 0.25, 375.0, 1)
    assert b["wall_ms_a_step"] == pytest.approx(0.15)
