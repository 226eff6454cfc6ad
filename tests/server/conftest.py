"""A served FakeEngine: byte tokenizer, real service, real app, no sockets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from octavo.core.request import Request
from octavo.core.validation import Limits
from octavo.engine.service import Service
from octavo.server.app import build_app
from octavo.server.gate import Gate
from octavo.server.settings import ServerSettings
from octavo.text.chat import ChatTemplate, load_chat_template
from octavo.text.front import TextFront
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from tests.fakes.asgi import Client
from tests.fakes.bytetok import BYTE_OFFSET, EOS_ID, byte_ids, write_byte_tokenizer
from tests.fakes.engine import FakeEngine, Script

MODEL = "TINY"
VOCAB_SIZE = 512
FIRST_PIECE_ID = BYTE_OFFSET + 256


@dataclass
class Served:
    app: FastAPI
    client: Client
    engine: FakeEngine
    service: Service
    gate: Gate

    @property
    def requests(self) -> list[Request]:
        return list(self.engine.submitted.values())


@cache
def load_text(folder: Path) -> tuple[Tokenizer, ChatTemplate | None]:
    return load_tokenizer(folder), load_chat_template(folder)


@pytest.fixture(scope="session")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tok") / "bytes", VOCAB_SIZE)


@pytest.fixture
def serve(byte_folder: Path) -> Callable[..., Any]:
    """``await serve(script, **settings)`` gives a :class:`Served` that is ready (or not)."""

    async def make(
        script: Script | Callable[[Request], Script] | None = None,
        *,
        folder: Path = byte_folder,
        max_model_len: int = 512,
        ready: bool = True,
        **settings: Any,
    ) -> Served:
        tokenizer, template = load_text(folder)
        text = TextFront(tokenizer, template, max_model_len=max_model_len, threads=1)
        engine = FakeEngine(script, max_model_len=max_model_len, ready=ready)
        limits = Limits(
            vocab_size=VOCAB_SIZE, max_model_len=max_model_len, page_size=16, eos_ids=(EOS_ID,)
        )
        service = Service(engine, text, limits)
        if ready:
            await service.start()
        names = settings.pop("model_names", (MODEL,))
        options = ServerSettings(model_names=names, **settings)
        gate = Gate(options.max_concurrent_requests, options.max_waiting_requests)
        app = build_app(service, options, gate)
        return Served(app, Client(app), engine, service, gate)

    return make


@pytest.fixture
def pieces(tmp_path: Path) -> Callable[..., tuple[Path, list[int]]]:
    """A tokenizer folder in which each piece of bytes is one token, and those tokens' ids."""

    def make(*parts: bytes) -> tuple[Path, list[int]]:
        folder = write_byte_tokenizer(tmp_path / "pieces", VOCAB_SIZE)
        path = folder / "tokenizer.json"
        data = json.loads(path.read_text())
        vocab = data["model"]["vocab"]
        letters = {i: token for token, i in vocab.items()}
        ids = []
        for k, part in enumerate(dict.fromkeys(parts)):
            spelt = "".join(letters[i] for i in byte_ids(part))
            if len(part) > 1:
                del vocab[letters[FIRST_PIECE_ID + k]]
                vocab[spelt] = FIRST_PIECE_ID + k
            ids.append(vocab[spelt])
        known = dict(zip(dict.fromkeys(parts), ids, strict=True))
        path.write_text(json.dumps(data))
        return folder, [known[part] for part in parts]

    return make


def chat(content: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}


def prompt(text: Any = "hi", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": text, **more}


def chat_text(events: Iterable[dict[str, Any]], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for event in events
        for choice in event["choices"]
        if choice["index"] == index
    )


def completion_text(events: Iterable[dict[str, Any]], index: int = 0) -> str:
    return "".join(
        choice["text"]
        for event in events
        for choice in event["choices"]
        if choice["index"] == index
    )


def finishes(events: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    """(index, finish reason) of every event that has one."""
    return [
        (choice["index"], choice["finish_reason"])
        for event in events
        for choice in event["choices"]
        if choice["finish_reason"] is not None
    ]
