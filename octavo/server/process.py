"""A front process: ``python -m octavo.server.process``, started by the supervisor.

Orders come on standard input as one JSON line; the end of standard input means that the
supervisor is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys

from octavo.config.resolve import Config
from octavo.core.errors import EngineUnavailable, StartupError
from octavo.engine.children import (
    die_with_parent,
    ignore_interrupts,
    read_orders,
    report,
    set_up_logging,
    watch_parent,
)
from octavo.engine.launch import FrontOrders
from octavo.engine.remote import SocketClient
from octavo.engine.service import Service
from octavo.engine.startup import build_text, request_limits, sampling_defaults
from octavo.server.front import serve_front
from octavo.server.settings import ServerSettings
from octavo.text.chat import NO_TEMPLATE
from octavo.text.front import TextFront

log = logging.getLogger("octavo.server")


def main() -> int:
    die_with_parent("octavo-front")
    ignore_interrupts()
    orders = read_orders(FrontOrders)
    set_up_logging(orders.config.log_level, "front")
    watch_parent(lambda: os._exit(1))  # a drain is asked for by a signal
    try:
        asyncio.run(_serve(orders))
    except StartupError as error:
        report(kind="failed", error=str(error))
        return 1
    except EngineUnavailable as error:  # the supervisor knows why
        report(kind="failed", error=error.message)
        return 1
    return 0


def server_settings(config: Config) -> ServerSettings:
    return ServerSettings(
        model_names=config.served_model_name,
        api_keys=config.api_key,
        max_body_bytes=config.max_body_bytes,
        max_waiting_requests=config.max_num_queued_reqs,
        # Of so many some wait, whatever they have said before (preempted, or not read by a client).
        max_concurrent_requests=config.max_num_seqs + config.max_num_queued_reqs,
        allowed_origins=config.allowed_origins,
        root_path=_root_path(config.root_path),
        enable_docs=not config.disable_fastapi_docs,
        log_requests=config.enable_log_requests,
        keep_alive_s=config.sse_keep_alive_interval,
        default_sampling=sampling_defaults(config),
    )


def _root_path(given: str) -> str:
    """With a slash at the front and none at the end; nothing stays nothing."""
    path = given.strip("/")
    return f"/{path}" if path else ""


async def _serve(orders: FrontOrders) -> None:
    config = orders.config
    warn_of_policy(config)
    client = SocketClient(orders.socket, orders.name)
    text = build_text(config)
    _warn_of_template(text)
    service = Service(client, text, request_limits(config, text))
    with socket.socket(fileno=orders.listen_fd) as sock:
        await serve_front(
            service,
            server_settings(config),
            sock,
            shutdown_timeout_s=config.shutdown_timeout,
            log_level=config.uvicorn_log_level,
            access_log=not config.disable_access_log,
            on_ready=lambda: report(kind="ready", chats=_template_problem(text) is None),
        )
    await client.close()


def warn_of_policy(config: Config) -> None:
    """Shares are by API key: with fewer than two there is nothing to share out."""
    if config.scheduling_policy == "fair" and len(set(config.api_key)) < 2:
        log.warning(
            "--scheduling-policy fair has no effect across callers: it shares between API keys, "
            "and there %s; give two or more --api-key.",
            "is one" if config.api_key else "are none",
        )


def _warn_of_template(text: TextFront) -> None:
    """Say now what each chat request would be told."""
    if problem := _template_problem(text):
        log.warning("Chat will answer 400, completions work: %s", problem)


def _template_problem(text: TextFront) -> str | None:
    return NO_TEMPLATE if text.template is None else text.template.problem


if __name__ == "__main__":
    sys.exit(main())
