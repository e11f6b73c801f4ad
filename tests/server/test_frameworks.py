"""Clients that people have already, as they come: LangChain's and LlamaIndex's, against a live server."""

import asyncio
from typing import Any

import pytest
from live import LOOPBACK, MODEL, Live

pytestmark = pytest.mark.enable_socket

QUESTION = "When does the office open?"
DOCUMENTS = [{"title": "Hours", "text": "The office opens at seven."}]
SCHEMA = {
    "title": "Hours",
    "type": "object",
    "properties": {"open": {"type": "boolean"}},
    "required": ["open"],
    "additionalProperties": False,
}


def url(server: Live) -> str:
    return f"http://{LOOPBACK}:{server.port}/v1"


def engine_says(server: Live, documents: Any = (), **options: Any) -> str:
    return server.served.engine.generate(list(documents), QUESTION, **{"max_new_tokens": 8, **options}).text


@pytest.fixture(scope="module")
def langchain(server: Live) -> Any:
    from langchain_openai import ChatOpenAI

    found = ChatOpenAI(base_url=url(server), api_key="none", model=MODEL, temperature=0, max_tokens=8, max_retries=0)
    yield found
    found.root_client.close()


@pytest.fixture(scope="module")
def llama_index(server: Live) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    found = OpenAILike(
        api_base=url(server),
        api_key="none",
        model=MODEL,
        temperature=0,
        max_tokens=8,
        is_chat_model=True,
        max_retries=0,
    )
    yield found
    found._get_client().close()


def test_langchain_asks_streams_and_batches(server: Live, langchain: Any) -> None:
    wanted = engine_says(server)
    found = langchain.invoke(QUESTION)
    assert found.content == wanted
    assert found.usage_metadata["output_tokens"] == found.response_metadata["token_usage"]["completion_tokens"]
    assert "".join(chunk.content for chunk in langchain.stream(QUESTION)) == wanted
    assert [one.content for one in langchain.batch([QUESTION, QUESTION])] == [wanted, wanted]

    async def later() -> str:
        try:
            return (await langchain.ainvoke(QUESTION)).content
        finally:
            await langchain.root_async_client.close()

    assert asyncio.run(later()) == wanted


def test_langchain_hands_documents_over_and_tells_where_they_came_from(server: Live, langchain: Any) -> None:
    found = langchain.invoke(QUESTION, extra_body={"documents": DOCUMENTS})
    assert found.content == engine_says(server, DOCUMENTS)
    assert found.response_metadata["token_usage"]["kvlink"]["mode"] == "documents"


def test_langchain_gets_structured_output(langchain: Any) -> None:
    asking = langchain.model_copy(update={"max_tokens": 400}).with_structured_output(SCHEMA, method="json_schema")
    assert set(asking.invoke(QUESTION)) == {"open"}


def test_langchain_is_told_that_tools_are_not_served(langchain: Any) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        langchain.bind_tools([{"type": "function", "function": {"name": "f", "parameters": {}}}]).invoke(QUESTION)


def test_llama_index_asks_and_streams(server: Live, llama_index: Any) -> None:
    from llama_index.core.llms import ChatMessage

    wanted = engine_says(server)
    assert llama_index.complete(QUESTION).text == wanted
    messages = [ChatMessage(role="user", content=QUESTION)]
    assert llama_index.chat(messages).message.content == wanted
    assert "".join(chunk.delta for chunk in llama_index.stream_chat(messages)) == wanted

    async def later() -> str:
        try:
            return (await llama_index.achat(messages)).message.content
        finally:
            await llama_index._get_aclient().close()

    assert asyncio.run(later()) == wanted


def test_llama_index_hands_documents_over(server: Live, llama_index: Any) -> None:
    from llama_index.core.llms import ChatMessage

    asked = [ChatMessage(role="user", content=QUESTION)]
    found = llama_index.chat(asked, extra_body={"documents": DOCUMENTS})
    assert found.message.content == engine_says(server, DOCUMENTS)
    assert found.raw.usage.kvlink["documents"][0]["tokens"] > 0


def test_llama_index_completes_without_a_template(server: Live, llama_index: Any) -> None:
    plain = llama_index.model_copy(update={"is_chat_model": False})
    wanted = server.openai.completions.create(model=MODEL, prompt=QUESTION, temperature=0, max_tokens=8)
    assert plain.complete(QUESTION).text == wanted.choices[0].text
