"""Real client libraries drive every endpoint, streaming and not."""

from __future__ import annotations

import anthropic
import openai
import pytest

from tests.gpu.gateway.fake import FakeAgent, Rig, rig, run

TEXT = "it works well"
SAY = [{"role": "user", "content": "hello"}]


def openai_client(made: Rig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{made.url}/v1", api_key="any", max_retries=0)


def anthropic_client(made: Rig) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=made.url, api_key="any", max_retries=0)


def test_chat_completions() -> None:
    async def test() -> None:
        async with rig() as made, openai_client(made) as client:
            whole = await client.chat.completions.create(model="m", messages=SAY)
            assert whole.choices[0].message.content == TEXT
            assert whole.usage and whole.usage.prompt_tokens_details and whole.usage.prompt_tokens_details.cached_tokens == 4
            stream = await client.chat.completions.create(model="m", messages=SAY, stream=True)
            assert [chunk.choices[0].delta.content async for chunk in stream] == TEXT.split()
            assert (await made.settled())["completed"] == 2

    run(test())


def test_completions() -> None:
    async def test() -> None:
        async with rig() as made, openai_client(made) as client:
            whole = await client.completions.create(model="m", prompt="hello")
            assert whole.choices[0].text == TEXT
            stream = await client.completions.create(model="m", prompt="hello", stream=True)
            assert [chunk.choices[0].text async for chunk in stream] == TEXT.split()

    run(test())


def test_responses() -> None:
    async def test() -> None:
        async with rig() as made, openai_client(made) as client:
            whole = await client.responses.create(model="m", input="hello")
            assert whole.output_text == TEXT
            stream = await client.responses.create(model="m", input="hello", stream=True)
            kinds = [event.type async for event in stream]
            assert kinds[0] == "response.created" and kinds[-1] == "response.completed"

    run(test())


def test_messages() -> None:
    async def test() -> None:
        async with rig() as made, anthropic_client(made) as client:
            whole = await client.messages.create(model="m", max_tokens=10, messages=SAY)
            assert whole.content[0].text == TEXT
            async with client.messages.stream(model="m", max_tokens=10, messages=SAY) as stream:
                assert [word async for word in stream.text_stream] == TEXT.split()

    run(test())


def test_thinking_tools_and_cache_marks_pass_through_untouched() -> None:
    body = {
        "model": "m", "max_tokens": 10, "thinking": {"type": "enabled", "budget_tokens": 1024},
        "system": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "t", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}], "messages": SAY,
    }  # fmt: skip

    async def test() -> None:
        async with rig() as made:
            assert (await made.post("/v1/messages", body)).status == 200
            assert made.agents[0].submitted[0].document == body

    run(test())


def test_counting_tokens_takes_no_slot() -> None:
    async def test() -> None:
        async with rig(FakeAgent("a", "other"), FakeAgent("b", "m")) as made, anthropic_client(made) as client:
            counted = await client.messages.count_tokens(model="m", messages=SAY)
            assert counted.input_tokens > 0
            assert made.agents[1].requests == 1 and not made.agents[1].submitted
            assert (await made.calls())["accepted"] == 0

    run(test())


def test_models_in_both_shapes() -> None:
    async def test() -> None:
        async with rig(FakeAgent("a", "m", "n"), aliases={"gpt-5": "m", "claude-*": "n"}) as made:
            async with openai_client(made) as client:
                assert [model.id async for model in client.models.list()] == ["m", "n", "gpt-5"]
                assert (await client.models.retrieve("claude-opus")).id == "claude-opus"
            async with anthropic_client(made) as client:
                assert [model.id async for model in client.models.list()] == ["m", "n", "gpt-5"]

    run(test())


def test_errors_arrive_as_the_libraries_own_exceptions() -> None:
    async def test() -> None:
        async with rig() as made:
            async with openai_client(made) as client:
                with pytest.raises(openai.NotFoundError, match="nope"):
                    await client.chat.completions.create(model="nope", messages=SAY)
                with pytest.raises(openai.BadRequestError, match="previous_response_id"):
                    await client.responses.create(model="m", input="x", previous_response_id="r1")
            async with anthropic_client(made) as client:
                with pytest.raises(anthropic.NotFoundError) as found:
                    await client.messages.create(model="nope", max_tokens=1, messages=SAY)
                assert found.value.body["error"]["type"] == "not_found_error"  # type: ignore[index, call-overload]

    run(test())


def test_an_engines_refusal_is_passed_on() -> None:
    async def test() -> None:
        agent = FakeAgent("a")
        agent.refuse = 400, b'{"error": {"message": "too long", "type": "bad", "code": 400}}'
        async with rig(agent) as made, openai_client(made) as client:
            with pytest.raises(openai.BadRequestError, match="too long"):
                await client.chat.completions.create(model="m", messages=SAY)
            counts = await made.settled()
            assert (counts["failed"], counts["completed"]) == (1, 0)

    run(test())
