"""What clients may send: the fields of OpenAI's API that are carried out. All others are refused by their name.

A field that is null, or says what holds anyway (`tools: []`), is as good as absent. Knows no engine.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvlink.engine.sampling import SamplingParams

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_DOCUMENTS = 1000
COMPLETION_TOKENS = 16
"""Tokens of a completion where the client does not say; the API's own default."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "store": (False,),
    "suffix": ("",),
    "tool_calls": ([],),
    "tools": ([],),
}


class Body(BaseModel):
    """A JSON object whose fields are all carried out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {
            name: value
            for name, value in given.items()
            if value is not None and not (name in _NEUTRAL and value in _NEUTRAL[name])
        }


def _joined(content: Any) -> Any:
    """Join a content of text parts; what is no text stays, and is refused."""
    if isinstance(content, list) and content:
        parts: list[str] = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind != "text" or not isinstance(part.get("text"), str) or part.keys() - {"type", "text"}:
                named = kind if isinstance(kind, str) and kind.isidentifier() else "one"
                raise ValueError(f"a part of type {named} is not supported: pass parts of type text")
            parts.append(part["text"])
        return "".join(parts)
    return content


Text = Annotated[str, BeforeValidator(_joined)]


class Message(Body):
    """What one side of a conversation said."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text


class LibraryDocument(Body):
    """A document of the library."""

    id: str


class InlineDocument(Body):
    """A document that comes with its request; its id names it in the usage alone."""

    text: str
    title: str = ""
    id: str = ""


class JsonSchema(Body):
    """A schema and its name."""

    name: str = ""
    description: str = ""
    strict: bool = True
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """What form the answer has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("the type json_schema and the field json_schema go together")
        return self

    @property
    def schema_to_follow(self) -> dict[str, Any] | None:
        """The schema, `{"type": "object"}` for any object, or None for text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class StreamOptions(Body):
    """What a stream tells beside its text."""

    include_usage: bool = False


class Asked(Body):
    """What both kinds of requests share."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] = Field(default_factory=list[str])
    seed: int | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    max_tokens: int | None = Field(None, ge=1)
    user: str = ""

    @model_validator(mode="after")
    def _streams(self) -> "Asked":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, choice: int, *, logprobs: int | None, schema: dict[str, Any] | None = None) -> SamplingParams:
        """Return how the tokens of one choice are chosen; each has a seed of its own."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=None if self.seed is None else self.seed + choice,
            logprobs=logprobs,
            json_schema=schema,
        )


class ChatRequest(Asked):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    documents: list[str | LibraryDocument | InlineDocument] = Field(
        default_factory=list[Any], max_length=MOST_DOCUMENTS
    )
    labels: bool = False
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    max_completion_tokens: int | None = Field(None, ge=1)
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _logs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


class CompletionRequest(Asked):
    """`POST /v1/completions`."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)]
    logprobs: int | None = Field(None, ge=0, le=20)


class DocumentBody(Body):
    """`PUT /v1/documents/{id}`."""

    text: str
    title: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])


class IdentifiedBody(DocumentBody):
    """A document and its id."""

    id: str


class DocumentsBody(Body):
    """`POST /v1/documents`."""

    documents: list[IdentifiedBody] = Field(min_length=1, max_length=MOST_DOCUMENTS)


class WarmRequest(Body):
    """`POST /v1/warm`."""

    documents: list[str | LibraryDocument] = Field(min_length=1, max_length=MOST_DOCUMENTS)
