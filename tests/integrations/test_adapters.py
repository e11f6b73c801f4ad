"""What LangChain and LlamaIndex have retrieved reaches a live server as documents; the examples run as they are."""

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
from live import LOOPBACK, MODEL, Live, live, tiny_engine

from kvlink.engine.library import Library
from kvlink.server.served import Served

pytestmark = pytest.mark.enable_socket

QUESTION = "When does the office open?"
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    from langchain_openai import ChatOpenAI

    folder = tmp_path_factory.mktemp("library")
    with tiny_engine(folder / "entries") as engine, Library(folder, engine) as library:
        library.put("hours", "The office opens at seven.", "Hours")
        with live(Served(engine=engine, library=library, model=MODEL)) as one:
            yield one
            ChatOpenAI(base_url=url(one), api_key="none", model=MODEL).root_client.close()  # all of one URL share it


def url(server: Live) -> str:
    return f"http://{LOOPBACK}:{server.port}/v1"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def engine_says(server: Live, documents: Any) -> str:
    return server.served.engine.generate(documents, QUESTION, max_new_tokens=8).text


def test_langchain_documents_become_the_field() -> None:
    from langchain_core.documents import Document

    from kvlink.integrations.langchain import documents_of

    found = [Document("Text.", metadata={"title": "T", "heading": "H"}, id="a"), Document("Other.")]
    assert documents_of(found) == [{"id": "a", "title": "T", "text": "Text."}, {"title": "", "text": "Other."}]
    assert documents_of(found[:1], title="heading")[0]["title"] == "H"
    assert documents_of(found[:1], by_id=True) == [{"id": "a"}]
    with pytest.raises(ValueError, match="no id"):
        documents_of(found, by_id=True)


def test_a_langchain_chain_answers_streams_and_waits_for_nobody(shelf: Live) -> None:
    from langchain_core.callbacks import CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever
    from langchain_openai import ChatOpenAI

    from kvlink.integrations.langchain import answering

    class Found(BaseRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
            assert query == QUESTION
            return [Document("The office opens at seven.", metadata={"title": "Hours"}, id="hours")]

    llm = ChatOpenAI(base_url=url(shelf), api_key="none", model=MODEL, temperature=0, max_tokens=8)
    wanted = engine_says(shelf, [{"title": "Hours", "text": "The office opens at seven."}])
    for by_id in (False, True):
        chain = answering(llm, Found(), by_id=by_id)
        found = chain.invoke(QUESTION)
        assert found.content == wanted
        assert found.response_metadata["token_usage"]["kvlink"]["documents"][0]["id"] == "hours"
    assert "".join(str(piece.content) for piece in chain.stream(QUESTION)) == wanted

    async def later() -> Any:
        try:
            return (await chain.ainvoke(QUESTION)).content
        finally:
            await llm.root_async_client.close()

    assert asyncio.run(later()) == wanted


def test_llama_index_nodes_become_the_field() -> None:
    from llama_index.core.schema import NodeWithScore, TextNode

    from kvlink.integrations.llama_index import documents_of

    node = TextNode(text="Text.", id_="a", metadata={"title": "T", "path": "/x"})
    wanted = {"id": "a", "title": "T", "text": "Text."}
    assert documents_of([node, NodeWithScore(node=node, score=1.0)]) == [wanted, wanted]
    assert documents_of([node], by_id=True) == [{"id": "a"}]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_llama_index_synthesizer_answers_from_its_nodes(shelf: Live, streaming: bool) -> None:
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.llms.openai_like import OpenAILike

    from kvlink.integrations.llama_index import DocumentSynthesizer

    llm = OpenAILike(api_base=url(shelf), api_key="none", model=MODEL, temperature=0, max_tokens=8, is_chat_model=True)
    nodes = [NodeWithScore(node=TextNode(text="The office opens at seven.", metadata={"page": "3"}), score=1.0)]
    wanted = engine_says(shelf, [nodes[0].node.get_content(metadata_mode="llm")])
    asked = DocumentSynthesizer(llm, streaming=streaming)
    found = asked.synthesize(QUESTION, nodes)
    assert ("".join(found.response_gen) if streaming else found.response) == wanted

    async def later() -> str:
        try:
            found = await asked.asynthesize(QUESTION, nodes)
            return "".join([piece async for piece in found.response_gen]) if streaming else found.response
        finally:
            await llm._get_aclient().close()

    assert asyncio.run(later()) == wanted
    llm._get_client().close()


def test_the_examples_run(shelf: Live) -> None:
    sources = example("ask_with_langchain").main(url(shelf), MODEL)
    assert sources[:2] == ["encoded", "encoded"]
    assert sources[2:] == ["device", "device"]
    assert len(example("ask_with_llama_index").main(url(shelf), MODEL)) == 2
