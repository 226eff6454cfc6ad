"""What operators and orchestrators ask: probes, version, metrics, audit, cache reset."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from fastapi import FastAPI
from msgspec import Struct
from starlette.responses import Response

from octavo.core.errors import EngineFault, EngineUnavailable, OctavoError, ServerError
from octavo.server.context import Context
from octavo.server.metrics import CONTENT_TYPE
from octavo.server.openapi import describe
from octavo.server.routes.body import answer
from octavo.server.schemas.answers import (
    AuditAnswer,
    AuditHostPages,
    AuditPages,
    AuditSlots,
    ResetAnswer,
    Status,
    Version,
)

STATS_TIMEOUT_S = 2.0
Probe: TypeAlias = Callable[[], Awaitable[Response]]


def probe_routes(app: FastAPI, context: Context) -> None:
    """The public routes: they say whether, never what."""

    def status(ok: bool) -> Response:
        health = context.service.health()
        state = "draining" if context.gate.draining else health.state
        body = Status("ok" if ok else "unavailable", state)
        if health.detail:
            body.detail = health.detail
        return answer(body, 200 if ok else 503)

    def probe(path: str, summary: str, model: type[Struct] = Status) -> Callable[[Probe], Probe]:
        """Load balancers ask by HEAD, too."""

        def add(endpoint: Probe) -> Probe:
            app.get(path, summary=summary, openapi_extra=describe("Probes", None, model))(endpoint)
            app.head(path, include_in_schema=False)(endpoint)
            return endpoint

        return add

    @probe("/live", "Is the process up?")
    async def live() -> Response:
        """200 as long as this process answers, whatever the engine does."""
        return status(True)

    @probe("/health", "Does an engine serve?")
    @probe("/ping", "The same as /health")
    async def health() -> Response:
        """503 while no engine serves."""
        return status(context.service.health().serving)

    @probe("/ready", "Should traffic be sent here?")
    async def ready() -> Response:
        """503 until warm, and while draining."""
        now = context.service.health()
        return status(now.serving and now.state == "ready" and not context.gate.draining)

    @probe("/version", "Octavo's version", Version)
    async def version() -> Response:
        return answer(Version(context.settings.version))


def admin_routes(app: FastAPI, context: Context) -> None:

    @app.get("/metrics", summary="Prometheus metrics", tags=["Operate"])
    async def metrics() -> Response:
        """Text exposition format. Each number has two names, ``octavo:…`` and ``vllm:…``."""
        info = getattr(context.service, "info", None)  # absent until an engine was ready
        text = context.metrics.scrape(await _stats(context), info)
        return Response(text, media_type=CONTENT_TYPE)

    @app.get(
        "/debug/audit",
        summary="Check that no page and no slot is lost",
        openapi_extra=describe("Operate", None, AuditAnswer),
    )
    @app.post("/debug/audit", include_in_schema=False)
    async def audit() -> Response:
        """Recounts pages, host pages and slots between two steps. If something is lost, that is
        a bug of Octavo, and the answer is 500 with what was found."""
        context.gate.check(context.service.health())
        try:
            stats = await context.service.control("audit")
        except EngineUnavailable:
            raise
        except ServerError as error:
            raise EngineFault(error.message, code="audit_failed") from None
        return answer(_audited(stats, context.service.info.max_num_seqs))

    @app.post(
        "/reset_prefix_cache",
        summary="Forget all cached prefixes",
        openapi_extra=describe("Operate", None, ResetAnswer),
    )
    async def reset_prefix_cache() -> Response:
        """What runs goes on; no prompt that comes later hits a page computed before."""
        context.gate.check(context.service.health())
        return answer(ResetAnswer(await context.service.control("reset_prefix_cache")))


def _audited(stats: Mapping[str, Any], num_slots: int) -> AuditAnswer:
    pages = (stats[f"pages_{kind}"] for kind in ("total", "free", "cached", "referenced"))
    return AuditAnswer(
        pages=AuditPages(*pages),
        host_pages=AuditHostPages(stats["host_pages_total"], stats["host_pages_free"]),
        slots=AuditSlots(num_slots, stats["running"]),
        waiting=stats["waiting"] - stats["swapped"],
        swapped=stats["swapped"],
        audit_failures=stats["audit_failures"],
    )


async def _stats(context: Context) -> dict[str, Any] | None:
    """The engine's numbers, or None if it does not answer: a scrape always succeeds."""
    if not context.service.health().serving:
        return None
    try:
        async with asyncio.timeout(STATS_TIMEOUT_S):
            stats: dict[str, Any] = await context.service.control("stats")
            return stats
    except (TimeoutError, OctavoError):
        return None
