"""LangChain: retrieved `Document`s go to `ChatOpenAI` as documents that the server reuses, instead of into the prompt.

Needs the extra `langchain`.
"""

from collections.abc import Iterable
from typing import Any

try:
    from langchain_core.documents import Document
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import BaseMessage
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import Runnable, RunnableLambda
except ImportError as error:
    raise ImportError(f"this needs {error.name}: pip install 'kvlink[langchain]'") from error


def documents_of(found: Iterable[Document], *, by_id: bool = False, title: str = "title") -> list[dict[str, str]]:
    """Return retrieved documents as the field `documents` of a request.

    Args:
        by_id: Name documents that the server's library holds, by `Document.id`, and send no text.
        title: Which of a document's metadata is shown to the model above its text.

    Raises:
        ValueError: A document is to be named, and has no id.
    """
    return [_field(one, by_id=by_id, title=title) for one in found]


def answering(
    llm: BaseChatModel, retriever: BaseRetriever, *, by_id: bool = False, title: str = "title"
) -> Runnable[str, BaseMessage]:
    """Return a chain that retrieves documents for a question and lets the model answer from them.

    It streams, and runs in async code, as the model does by itself.

    Args:
        llm: A `ChatOpenAI` whose `base_url` is a KVLink server.
        by_id, title: As in `documents_of`.
    """

    def bound(found: Iterable[Document]) -> Any:
        return llm.bind(extra_body={"documents": documents_of(found, by_id=by_id, title=title)})

    def ask(question: str) -> Any:
        return bound(retriever.invoke(question))

    async def ask_later(question: str) -> Any:
        return bound(await retriever.ainvoke(question))

    return RunnableLambda(ask, afunc=ask_later)


def _field(document: Document, *, by_id: bool, title: str) -> dict[str, str]:
    if by_id:
        if not document.id:
            raise ValueError(f"this document has no id: {document.page_content[:40]!r}; name it, or send its text")
        return {"id": document.id}
    named = {"id": document.id} if document.id else {}
    return {**named, "title": str(document.metadata.get(title) or ""), "text": document.page_content}
