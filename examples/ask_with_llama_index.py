"""LlamaIndex in front of a KVLink server: what a retriever finds is reused, not read again with each question.

kvlink serve &
python examples/ask_with_llama_index.py http://127.0.0.1:8000/v1 demo
"""

import sys

import httpx
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.llms.openai_like import OpenAILike

from kvlink.integrations.llama_index import DocumentSynthesizer

NODES = [
    TextNode(text="Each employee gets 27 days of leave a year.", id_="leave"),
    TextNode(text="The office opens at seven and closes at six.", id_="hours"),
]


class Everything(BaseRetriever):
    """Finds all nodes; yours would ask an index."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node, score=1.0) for node in NODES]


def main(url: str, model: str) -> list[str]:
    """Ask two questions about the same nodes, and print the answers."""
    answers: list[str] = []
    with httpx.Client() as http:
        llm = OpenAILike(api_base=url, api_key="none", model=model, max_tokens=40, is_chat_model=True, http_client=http)
        engine = RetrieverQueryEngine(Everything(), response_synthesizer=DocumentSynthesizer(llm))
        for question in ("How many days of leave are there?", "When does the office open?"):
            answers.append(str(engine.query(question)))
            print(question, answers[-1], sep="\n")  # noqa: T201
    return answers


if __name__ == "__main__":
    main(*sys.argv[1:])
