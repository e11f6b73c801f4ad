"""llama.cpp on a GGUF file, as a rival: its own kernels on the quantised weights, and its cache of the last prompt.

It computes with 4 or 8 bits where the other arms have float32, so its times are to be compared, not its tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch

from kvlink.core.errors import InputError
from kvlink.evaluation.bench.prefix_cache import common_beginning


@final
class LlamaCpp:
    """A model in llama.cpp, which keeps keys and values of the last prompt.

    Attributes:
        computed: Tokens that the last prompt computed.
    """

    def __init__(self, gguf: Path, *, capacity: int) -> None:
        """Load a file.

        Args:
            capacity: Tokens of the longest prompt.

        Raises:
            InputError: The package is not installed, or cannot read the file.
        """
        try:
            from llama_cpp import Llama  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise InputError("the arm llama.cpp needs llama-cpp-python: pip install 'kvlink[llama]'") from error
        threads = torch.get_num_threads()
        options = {"n_ctx": capacity + 1, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
        try:
            self._model: Any = Llama(str(gguf), **options)
        except (ValueError, OSError) as error:
            raise InputError(f"llama.cpp cannot load {gguf}: {error}") from error
        self._ids: tuple[int, ...] = ()
        self.computed = 0

    def first_token(self, ids: Sequence[int]) -> int:
        """Compute what is not known of a prompt; returns the likeliest first token of the answer."""
        self.computed = len(ids) - min(common_beginning(self._ids, ids), len(ids) - 1)
        self._ids = tuple(ids)
        return next(self._model.generate(list(ids), top_k=1, temp=0.0))

    def forget(self) -> None:
        """Know nothing any more."""
        self._model.reset()
        self._ids = ()
