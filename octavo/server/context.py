"""Context: what every route is given. There are no globals."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.service import Service
from octavo.server.gate import Gate
from octavo.server.metrics import Metrics
from octavo.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Context:
    service: Service
    settings: ServerSettings
    gate: Gate
    metrics: Metrics
