"""Launch orders: what the supervisor tells each child on its standard input, as one JSON line."""

from __future__ import annotations

import msgspec

from octavo.config.resolve import Config


class EngineOrders(msgspec.Struct):
    config: Config
    socket: str  # path of the Unix socket to listen on


class FrontOrders(msgspec.Struct):
    config: Config
    name: str
    socket: str  # path of the engine's Unix socket
    listen_fd: int  # inherited, bound and listening TCP socket
