"""LlamaIndex: retrieved nodes go to `OpenAILike` as documents that the server reuses, instead of into the prompt.

Needs the extra `llama-index`.
"""

from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from typing import Any

try:
    from llama_index.core.base.llms.types import ChatMessage, MessageRole
    from llama_index.core.llms import LLM
    from llama_index.core.response_synthesizers import BaseSynthesizer
    from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore
except ImportError as error:
    raise ImportError(f"this needs {error.name}: pip install 'kvlink[llama-index]'") from error


def documents_of(
    found: Iterable[BaseNode | NodeWithScore], *, by_id: bool = False, title: str = "title"
) -> list[dict[str, str]]:
    """Return retrieved nodes as the field `documents` of a request.

    Args:
        by_id: Name documents that the server's library holds, by `node_id`, and send no text.
        title: Which of a node's metadata is shown to the model above its text.
    """
    nodes = [one.node if isinstance(one, NodeWithScore) else one for one in found]
    if by_id:
        return [{"id": node.node_id} for node in nodes]
    return [
        {
            "id": node.node_id,
            "title": str(node.metadata.get(title) or ""),
            "text": node.get_content(metadata_mode=MetadataMode.NONE),
        }
        for node in nodes
    ]


class DocumentSynthesizer(BaseSynthesizer):
    """Lets a query engine answer from its nodes as documents: `index.as_query_engine(response_synthesizer=...)`.

    Each node is one document: what LlamaIndex would have put into the prompt of it, metadata for the model included.
    """

    def __init__(self, llm: LLM, *, streaming: bool = False, **options: Any) -> None:
        """Take the model to ask.

        Args:
            llm: An `OpenAILike(is_chat_model=True)` whose `api_base` is a KVLink server.
            streaming: Whether answers come piece by piece.
            options: Those of `BaseSynthesizer`.
        """
        super().__init__(llm=llm, streaming=streaming, **options)
        self._asked: LLM = llm

    def get_response(
        self, query_str: str, text_chunks: Sequence[str], **options: Any
    ) -> str | Generator[str, None, None]:
        """Answer from texts, each of them a document."""
        said = self._request(query_str, text_chunks)
        if self._streaming:
            return (piece.delta or "" for piece in self._asked.stream_chat(**said, **options))
        return self._asked.chat(**said, **options).message.content or ""

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **options: Any
    ) -> str | AsyncGenerator[str, None]:
        """Answer like `get_response`, in async code."""
        said = self._request(query_str, text_chunks)
        if self._streaming:
            return _deltas(await self._asked.astream_chat(**said, **options))
        return (await self._asked.achat(**said, **options)).message.content or ""

    def _request(self, query: str, texts: Sequence[str]) -> dict[str, Any]:
        return {
            "messages": [ChatMessage(role=MessageRole.USER, content=query)],
            "extra_body": {"documents": [{"text": text} for text in texts if text.strip()]},
        }

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts_dict: Any) -> None:
        """There are none: the question is asked as it is."""


async def _deltas(pieces: Any) -> AsyncGenerator[str, None]:
    async for piece in pieces:
        yield piece.delta or ""
