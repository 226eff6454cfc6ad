"""OpenAI's own client against the app."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.fakes.bytetok import byte_ids
from tests.fakes.engine import Script

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "hi"}]


def client_of(served, key: str = "k") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        api_key=key,
        base_url="http://test/v1",
        max_retries=0,
        http_client=httpx.AsyncClient(transport=httpx.ASGITransport(served.app)),
    )


async def test_chat_and_completions(serve):
    served = await serve(Script(byte_ids("Paris")), api_keys=("k",))
    async with client_of(served) as client:
        answer = await client.chat.completions.create(
            model="TINY", messages=MESSAGES, logprobs=True, top_logprobs=1, user="u", store=False
        )
        assert answer.choices[0].message.content == "Paris"
        assert answer.choices[0].logprobs.content[0].top_logprobs[0].token == "P"
        assert answer.usage.completion_tokens == 6
        text = await client.completions.create(model="TINY", prompt="x", echo=True, logprobs=1)
        assert text.choices[0].text == "xParis"
        assert [model.id async for model in client.models.list()] == ["TINY"]
        assert (await client.models.retrieve("TINY")).id == "TINY"


async def test_streams(serve):
    served = await serve(Script(byte_ids("Paris")))
    async with client_of(served) as client:
        stream = await client.chat.completions.create(
            model="TINY", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Paris"
        assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 6
        stream = await client.completions.create(model="TINY", prompt="x", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "Paris"


async def test_errors_become_the_clients_exceptions(serve):
    served = await serve(Script(byte_ids("abcdef"), fault_at=3), api_keys=("k",))
    async with client_of(served, "wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with client_of(served) as client:
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="TINY", messages=MESSAGES, n=1000)
        assert refused.value.param == "n"
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="TINY", messages=MESSAGES)
        stream = await client.chat.completions.create(model="TINY", messages=MESSAGES, stream=True)
        seen = []

        async def read_all() -> None:
            async for chunk in stream:
                seen.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError, match="token 3"):
            await read_all()
        assert "".join(seen) == "ab"
