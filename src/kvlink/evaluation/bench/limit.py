"""What this machine could do at best: new rows without documents, and the bare arithmetic of attending documents.

    limit = forward of the new rows, no documents (measured) + FLOPs of rows over documents / rate of matmuls (measured)

No reading, looking up, turning, softmax or merging: nothing that reads documents where they lie is faster.
"""

from collections.abc import Mapping
from time import perf_counter

import torch

from kvlink.core.layout import Kind, Layout, Prompt
from kvlink.engine.stream import greedy
from kvlink.evaluation.timing import Arm
from kvlink.models.links import LinkTokens, embed
from kvlink.models.rows import OwnRows, Run
from kvlink.models.runner import Runner
from kvlink.models.shared import forward


def limit_arm(runner: Runner, prompt: Prompt, *, links: LinkTokens | None, known: int) -> Arm:
    """Return an arm that measures the limit of one request; its parts are `forward_s` and `attention_s`.

    Args:
        known: Rows of the request whose keys and values are known: S, or S and the links.
    """
    layout = prompt.layout(num_links=links.num_links if links else 0)
    rows = layout.request_rows()
    own = OwnRows(runner, len(rows))
    with torch.inference_mode():
        embeds = embed(runner.embedding, links, prompt.ids(layout)[rows].to(runner.device))

    def compute(start: int, stop: int) -> None:
        own.length = start
        keep = torch.tensor([stop - start - 1], device=runner.device)
        greedy(forward(runner, [Run(own, rows[start:stop])], embeds[start:stop], keep=keep)[0])

    compute(0, known)
    flops = attention_flops(runner, layout, known=known)
    products = Products(runner, layout, known=known)

    def run() -> tuple[float, Mapping[str, float]]:
        start = perf_counter()
        compute(known, len(rows))
        forward_s = perf_counter() - start
        attention_s = flops / products.rate()
        return forward_s + attention_s, {"forward_s": forward_s, "attention_s": attention_s}

    return run


def attended(layout: Layout, *, known: int) -> list[tuple[int, int]]:
    """Return for each segment how many new rows attend it, and its tokens."""
    rows = layout.request_rows()[known:]
    return [(int((rows >= span.stop).sum()), len(span)) for span in layout.of(Kind.SEGMENT)]


def attention_flops(runner: Runner, layout: Layout, *, known: int) -> int:
    """Return the floating-point operations of queries by keys and weights by values, over the documents alone."""
    shape, heads = runner.geometry, runner.config.num_attention_heads
    pairs = sum(rows * tokens for rows, tokens in attended(layout, known=known))
    return 2 * pairs * shape.layers * heads * (shape.head_dim + shape.value_dim)


class Products:
    """Matrix products of the shapes that one layer's attention to all documents has."""

    def __init__(self, runner: Runner, layout: Layout, *, known: int) -> None:
        self._runner = runner
        shape = runner.geometry
        group = runner.config.num_attention_heads // shape.kv_heads
        self._flops = attention_flops(runner, layout, known=known)

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(shape.kv_heads, *sizes, dtype=runner.dtype, device=runner.device)

        self._factors = [
            (
                random(rows * group, shape.head_dim),
                random(tokens, shape.head_dim).transpose(1, 2),
                random(rows * group, tokens),
                random(tokens, shape.value_dim),
            )
            for rows, tokens in attended(layout, known=known)
        ]

    def rate(self) -> float:
        """Return floating-point operations per second, over as many layers as the model has."""
        self._runner.synchronize()
        start = perf_counter()
        for _ in range(self._runner.geometry.layers):
            for query, keys, weights, values in self._factors:
                torch.bmm(query, keys)
                torch.bmm(weights, values)
        self._runner.synchronize()
        return self._flops / (perf_counter() - start)
