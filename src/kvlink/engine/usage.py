"""What a request cost and where each document came from: plain values that every surface shows alike."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Source = Literal["device", "host", "disk", "remote", "encoded", "computed", "skipped", "dropped"]


@dataclass(frozen=True, slots=True)
class DocumentUsage:
    """One document of a request.

    Attributes:
        name: Its name, or `document N`.
        tokens: Its tokens, without label and links.
        source: Where its entry came from; `encoded` if it was computed now and kept, `computed` if it was part of one
            full forward, `skipped` or `dropped` if it was left out.
        codec: Codec of the stored object that was read, or None.
        reason: Why it was computed or left out; empty for a hit.
    """

    name: str
    tokens: int
    source: Source
    codec: str | None = None
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the row as it stands in every result; its name is called `id` there."""
        fields = asdict(self)
        return {"id": fields.pop("name"), **fields}


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of one request, by step; `ttft_s` runs from the text to the first token on the host."""

    tokenise_s: float = 0.0
    load_s: float = 0.0
    encode_s: float = 0.0
    rotate_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request used.

    Attributes:
        prompt_tokens: Ids of S, labels, documents and T; links are not counted.
        cached_tokens: Those of them that were not computed now.
        link_tokens: Link tokens in the prompt.
        completion_tokens: Ids of the answer, its end included.
        mode: `documents` when entries were reused, `exact` when everything was one causal forward.
        labels: Whether documents were labelled `[1] `, `[2] `, ...
        documents: One row per document, in the request's order.
        known_links: Link tokens that were not computed now, since the prompt's beginning was known.
    """

    prompt_tokens: int
    cached_tokens: int
    link_tokens: int
    completion_tokens: int
    mode: Literal["exact", "documents"]
    labels: bool = False
    documents: tuple[DocumentUsage, ...] = ()
    known_links: int = 0

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that went through the model now, links and fresh encodes included."""
        return self.prompt_tokens - self.cached_tokens + self.link_tokens - self.known_links

    def to_json(self) -> dict[str, Any]:
        """Return the block that Python, the command line and the server show alike."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "kvlink": {
                "mode": self.mode,
                "links": self.link_tokens,
                "labels": self.labels,
                "documents": [
                    {
                        "id": row.name,
                        "tokens": row.tokens,
                        "source": row.source,
                        "codec": row.codec,
                        "reason": row.reason,
                    }
                    for row in self.documents
                ],
            },
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one request.

    Attributes:
        text: The answer, cut before a stop string.
        ids: Generated ids, the end of the turn included if it was reached.
        finish_reason: `stop` (end of turn or stop string) or `length`.
    """

    text: str
    ids: tuple[int, ...]
    usage: Usage
    timings: Timings
    finish_reason: Literal["stop", "length"]
    warnings: tuple[str, ...] = field(default=())
