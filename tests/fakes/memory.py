"""FakeMemory: a device's memory by arithmetic."""

from __future__ import annotations


class FakeMemory:
    """A :class:`octavo.runner.memory.Memory`; ``context`` is taken beside what is reserved.

    ``takes(n)`` reserves, as running something would; :meth:`release` gives back all but ``kept``.
    """

    def __init__(self, total: int, *, others: int = 0, context: int = 0) -> None:
        self._total, self._others = total, others
        self.context, self.kept = context, 0
        self._cached = self._peak = 0

    def free(self) -> int:
        return self._total - self._others - self.context - self.reserved()

    def total(self) -> int:
        return self._total

    def reserved(self) -> int:
        return self.kept + self._cached

    def peak_reserved(self) -> int:
        return self._peak

    def release(self) -> None:
        self._cached = 0
        self._peak = self.kept

    def takes(self, size: int) -> None:
        self._cached = size
        self._peak = max(self._peak, self.reserved())
