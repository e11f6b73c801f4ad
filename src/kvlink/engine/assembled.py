"""A prompt that is handed over to the model's own `generate()`."""

from contextlib import nullcontext
from typing import Any

from kvlink.core.errors import InputError
from kvlink.engine.usage import Usage
from kvlink.models.adapter import Adapter
from kvlink.models.runner import Runner


class Assembled:
    """A laid-out prompt without its last token: what stock `generate()` continues from.

    Attributes:
        usage: As in an answer, with no completion yet.
    """

    def __init__(self, usage: Usage, *, runner: Runner, inputs: dict[str, Any], adapter: Adapter | None) -> None:
        self.usage = usage
        self._runner = runner
        self._inputs = inputs
        self._adapter = adapter

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for `model.generate(**inputs)`.

        The last id, the cache of all before it, a mask of full length and the last id's position.

        Raises:
            InputError: The bundle in use holds an adapter, of which the model alone knows nothing.
        """
        if self._adapter is not None:
            raise InputError(
                "the bundle in use holds an adapter that acts on every token behind the documents, and the model's own "
                "generate() alone would leave it out: call assembled.generate(...), which takes the same options"
            )
        return self._inputs

    def generate(self, **options: Any) -> Any:
        """Run the model's own `generate()` from here, the adapter of the bundle acting; returns what that returns.

        Args:
            options: Those of transformers' `generate`, such as `max_new_tokens` and `do_sample`.
        """
        with nullcontext() if self._adapter is None else self._adapter.acting(self._runner.model):
            return self._runner.model.generate(**self._inputs, **options)
