"""LangChain in front of a KVLink server: what a retriever finds is reused, not read again with each question.

kvlink serve &
python examples/ask_with_langchain.py http://127.0.0.1:8000/v1 demo
"""

import sys

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_openai import ChatOpenAI

from kvlink.integrations.langchain import answering

PAGES = [
    Document("Each employee gets 27 days of leave a year.", metadata={"title": "Leave"}, id="leave"),
    Document("The office opens at seven and closes at six.", metadata={"title": "Hours"}, id="hours"),
]


class Everything(BaseRetriever):
    """Finds all pages; yours would ask an index."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return PAGES


def main(url: str, model: str) -> list[str]:
    """Ask two questions about the same pages, and print from where these came."""
    llm = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=40)
    chain = answering(llm, Everything())
    sources: list[str] = []
    for question in ("How many days of leave are there?", "When does the office open?"):
        answer = chain.invoke(question)
        rows = answer.response_metadata["token_usage"]["kvlink"]["documents"]
        sources += [row["source"] for row in rows]
        print(question, answer.content, rows, sep="\n")  # noqa: T201
    return sources


if __name__ == "__main__":
    main(*sys.argv[1:])
