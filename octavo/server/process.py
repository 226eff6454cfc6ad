"""A front process: ``python -m octavo.server.process``, started by the supervisor.

Orders come on standard input as one JSON line; the end of standard input means that the
supervisor is gone.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading

import msgspec

from octavo.config.resolve import Config
from octavo.core.errors import EngineUnavailable, StartupError
from octavo.engine.children import die_with_parent, ignore_interrupts, report, set_up_logging
from octavo.engine.launch import FrontOrders
from octavo.engine.remote import SocketClient
from octavo.engine.service import Service
from octavo.engine.startup import build_text, request_limits, sampling_defaults
from octavo.server.front import serve_front
from octavo.server.settings import ServerSettings


def main() -> int:
    die_with_parent("octavo-front")
    ignore_interrupts()
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=FrontOrders)
    set_up_logging(orders.config.log_level, "front")
    threading.Thread(target=_watch_parent, daemon=True).start()
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
        max_concurrent_requests=config.max_num_queued_reqs,
        allowed_origins=config.allowed_origins,
        enable_docs=not config.disable_fastapi_docs,
        log_requests=config.enable_log_requests,
        keep_alive_s=config.sse_keep_alive_interval,
        default_sampling=sampling_defaults(config),
    )


async def _serve(orders: FrontOrders) -> None:
    config = orders.config
    client = SocketClient(orders.socket, orders.name)
    text = build_text(config)
    if text.template is None:
        _warn_no_template()
    service = Service(client, text, request_limits(config, text))
    with socket.socket(fileno=orders.listen_fd) as sock:
        await serve_front(
            service,
            server_settings(config),
            sock,
            shutdown_timeout_s=config.shutdown_timeout,
            log_level=config.uvicorn_log_level,
            access_log=not config.disable_access_log,
            on_ready=lambda: report(kind="ready"),
        )
    await client.close()


def _warn_no_template() -> None:
    import logging

    logging.getLogger("octavo.server").warning(
        "This model has no chat template: /v1/chat/completions will answer 400. "
        "Give one with --chat-template FILE; /v1/completions works."
    )


def _watch_parent() -> None:
    """The supervisor asks for a drain by a signal; the end of our input is its death."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
