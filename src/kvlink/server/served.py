"""What is served: an engine, perhaps a library over it, and the limits. All routes share one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvlink.core.document import Document
from kvlink.core.errors import InputError
from kvlink.engine.engine import Engine
from kvlink.engine.library import Library
from kvlink.server.metrics import Metrics
from kvlink.server.protocol import MOST_CHOICES
from kvlink.server.refusals import Refused

MAX_NEW_TOKENS = 512
"""Tokens of an answer where the client does not say; fewer where the context has less room."""


@dataclass(eq=False, kw_only=True)
class Served:
    """One model on the air.

    Attributes:
        engine: Attends documents where they lie; its steps run in a thread of its own while the server runs.
        library: Over that engine; None serves no ids.
        model: The name by which clients ask for it.
        max_new_tokens: Tokens of an answer where the client does not say.
        deadline_s: Seconds after which a request is given up.
        max_bytes: The largest body.
        most_jobs: Answers of one request.
    """

    engine: Engine
    library: Library | None = None
    model: str
    max_new_tokens: int = MAX_NEW_TOKENS
    deadline_s: float | None = 600.0
    max_bytes: int = 16 << 20
    most_jobs: int = MOST_CHOICES
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.engine)
        if self.library is not None:
            _ = self.library.engine  # made here, by one thread, for all that will ask at once

    def check_model(self, name: str) -> None:
        """Let a request for this model pass.

        Raises:
            Refused: 404; it is for another one.
        """
        if name != self.model:
            raise Refused(
                404, f"the model {name!r} is not served; {self.model!r} is", code="model_not_found", param="model"
            )

    def shelves(self) -> Library:
        """Return the library.

        Raises:
            Refused: 404; there is none.
        """
        if self.library is None:
            raise Refused(404, "no library is served: start kvlink serve with --library DIR", code="no_library")
        return self.library

    def texts(self, ids: Sequence[str]) -> dict[str, Document]:
        """Return current texts by id.

        Raises:
            Refused: 404; an id is unknown, or there is no library.
        """
        if not ids:
            return {}
        library = self.shelves()
        try:
            return {document.name: document for document in library.documents(list(dict.fromkeys(ids)))}
        except InputError as error:
            raise Refused(404, str(error), code="document_not_found", param="documents") from error

    def token_text(self, one: int) -> str:
        """Return the text of one id; of a control id its name."""
        prompter = self.engine.prompter
        if one in prompter.control_ids:
            return str(prompter.tokenizer.convert_ids_to_tokens(one))
        return prompter.decode([one])
