"""What is served: an engine, perhaps a library over it, who may ask, and the limits. All routes share one."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvlink.core.errors import InputError
from kvlink.engine.engine import Engine
from kvlink.engine.library import Library
from kvlink.server.following import Follower
from kvlink.server.metrics import Metrics
from kvlink.server.protocol import MOST_CHOICES
from kvlink.server.refusals import Refused
from kvlink.server.serves import Serves
from kvlink.server.shadow import Shadow
from kvlink.server.tenants import OPERATOR, Tenant
from kvlink.server.traces import Traces
from kvlink.server.view import View
from kvlink.store.journal import Journal

MAX_NEW_TOKENS = 512
"""Tokens of an answer where the client does not say; fewer where the context has less room."""


@dataclass(eq=False, kw_only=True)
class Served:
    """One model on the air.

    Attributes:
        engine: Attends documents where they lie; its steps run in a thread of its own while the server runs.
        library: Over that engine; None serves no ids.
        journal: Which texts of the library are current, on all machines that share it; None for a library of its own.
        model: The name by which clients ask for it.
        tenants: Who may ask.
        elements: Whether `<document>` elements in a user's message are documents.
        max_new_tokens: Tokens of an answer where the client does not say.
        max_prompt_tokens: Tokens of the longest prompt; None for what the context holds.
        deadline_s: Seconds after which a request is given up.
        max_bytes: The largest body.
        most_jobs: Answers of one request.
        shadow: Scores a share of answers in full, too; None for none.
        traces: Is told of each answer; None tells nobody.
        exact: Why every request is computed in full; empty as long as documents are reused.
    """

    engine: Engine
    library: Library | None = None
    journal: Journal | None = None
    model: str
    tenants: Sequence[Tenant] = (OPERATOR,)
    elements: bool = False
    max_new_tokens: int = MAX_NEW_TOKENS
    max_prompt_tokens: int | None = None
    deadline_s: float | None = 600.0
    max_bytes: int = 16 << 20
    most_jobs: int = MOST_CHOICES
    shadow: Shadow | None = None
    traces: Traces | None = None
    exact: str = ""
    metrics: Metrics = field(init=False)
    serves: Serves = field(init=False)
    follower: Follower | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Make what each tenant sees, once, by one thread, for all that will ask at once."""
        self.metrics, self.serves = Metrics(self.engine), serves_of(self.engine, self.model)
        if self.journal is not None:
            if self.library is None:
                raise InputError("a journal holds texts of a library: name its folder, too (--library DIR)")
            self.follower = Follower(self.library, self.journal, self.engine.call)
        self._views = {
            one: View(one, self.engine, self.library, self.follower) for one in dict.fromkeys((OPERATOR, *self.tenants))
        }

    def view(self, tenant: Tenant) -> View:
        """Return what a tenant sees."""
        return self._views[tenant]

    def check_model(self, name: str) -> None:
        """Let a request for this model pass.

        Raises:
            Refused: 404; it is for another one.
        """
        if name != self.model:
            raise Refused(
                404, f"the model {name!r} is not served; {self.model!r} is", code="model_not_found", param="model"
            )

    def token_text(self, one: int) -> str:
        """Return the text of one id; of a control id its name."""
        prompter = self.engine.prompter
        if one in prompter.control_ids:
            return str(prompter.tokenizer.convert_ids_to_tokens(one))
        return prompter.decode([one])


def serves_of(engine: Engine, name: str) -> Serves:
    """Return what an engine serves, for those who compare servers."""
    loader, sessions = engine.loader, engine.sessions
    return Serves(
        model=name,
        weights=loader.identity.model,
        entries=loader.name(()),
        links="" if sessions is None else sessions.bundle,
    )
