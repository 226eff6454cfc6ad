"""Work that grows with a request is done once, and not on the event loop."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

import octavo.engine.service
from octavo.text.tokenizer import Tokenizer
from tests.fakes.engine import Script
from tests.server.conftest import prompt

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"


async def test_bad_words_are_tokenized_once_for_all_prompts(serve, monkeypatch):
    served = await serve(Script([107]))
    seen: Counter[tuple[str, bool]] = Counter()
    encode = Tokenizer.encode

    def counted(self, text, **more):
        seen[text, threading.current_thread() is threading.main_thread()] += 1
        return encode(self, text, **more)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    words = [f"w{i}" for i in range(20)]
    reply = await served.client.post(COMPLETIONS, prompt(["a"] * 30, bad_words=words))
    assert reply.status == 200
    assert [seen[word, False] for word in words] == [1] * 20
    assert not any(on_loop for _, on_loop in seen)
    assert all(len(request.sampling.bad_words) >= 20 for request in served.requests)


async def test_requests_are_made_off_the_loop(serve, monkeypatch):
    served = await serve(Script([107]))
    make, threads = octavo.engine.service.make_requests, set()

    def watched(*args, **more):
        threads.add(threading.current_thread())
        return make(*args, **more)

    monkeypatch.setattr(octavo.engine.service, "make_requests", watched)
    assert (await served.client.post(COMPLETIONS, prompt(["a", "b"]))).status == 200
    assert threads
    assert threading.main_thread() not in threads


async def test_bad_words_times_choices_are_bounded(serve):
    served = await serve(Script([107]), max_model_len=2048)
    words = [f"w{i}" for i in range(1024)]
    reply = await served.client.post(COMPLETIONS, prompt(["a"] * 100, bad_words=words))
    assert reply.status == 400
    assert reply.error["param"] == "bad_words"
    assert "65536" in reply.error["message"]
