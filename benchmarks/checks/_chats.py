"""64 streamed chats at once: all end, say what the unstreamed answer says, and leave no page."""

from __future__ import annotations

import asyncio
import sys

from benchmarks.check import Check
from benchmarks.checks._serving import Server

CHATS = 64
MAX_TOKENS = 48
TOPICS = ("the sea", "a cat", "Paris", "rain", "bread", "the moon", "a train", "music")


def measure(check: Check) -> None:
    command = [sys.executable, "-m", "octavo", "serve", "--dtype", "float32", "--port", "0"]
    with Server([*command, "--disable-access-log"]) as server:
        streamed, plain, audit = asyncio.run(_talk(server.url))
    ended = sum(finish is not None for _, finish in streamed)
    equal = sum(a == b for a, b in zip(streamed, plain, strict=True))
    check.line("streamed_chats_ended_of_64", ended, "==", CHATS)
    check.line("streamed_text_equals_plain_of_64", equal, "==", CHATS)
    check.line("pages_referenced_afterwards", audit["pages"]["referenced"], "==", 0)


async def _talk(
    url: str,
) -> tuple[list[tuple[str, str | None]], list[tuple[str, str | None]], dict]:
    import httpx
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="EMPTY", timeout=600.0) as client:
        streamed = await asyncio.gather(*[_streamed(client, i) for i in range(CHATS)])
        plain = [await _plain(client, i) for i in range(CHATS)]
    async with httpx.AsyncClient() as http:
        audit = (await http.get(f"{url}/debug/audit")).json()
    return streamed, plain, audit


def _ask(index: int) -> dict:
    topic = TOPICS[index % len(TOPICS)]
    content = f"Write {index % 5 + 1} sentences about {topic}, number {index}."
    messages = [{"role": "user", "content": content}]
    return {
        "model": "SmolLM2-135M-Instruct",
        "messages": messages,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }


async def _streamed(client, index: int) -> tuple[str, str | None]:
    text, finish = "", None
    async for chunk in await client.chat.completions.create(**_ask(index), stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish


async def _plain(client, index: int) -> tuple[str, str | None]:
    choice = (await client.chat.completions.create(**_ask(index))).choices[0]
    return choice.message.content or "", choice.finish_reason
