"""The oracle: one forward over the whole prompt under the reference mask, without any reuse.

Every document stands behind its own copy of the sink prefix (method: `core.layout.ReferenceOrder`). Slow on
purpose: nothing is taken from an entry, so that reuse has something to be equal to.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlink.core.layout import Prompt, ReferenceOrder
from kvlink.models.assembler import Assembler
from kvlink.models.runner import Window


def reference_logits(
    assembler: Assembler,
    prompt: Prompt,
    *,
    sink_ids: tuple[int, ...] = (),
    order: ReferenceOrder | None = None,
    masks: dict[Window, Bool[Tensor, "rows rows"]] | None = None,
) -> Float[Tensor, "kept vocab"]:
    """Return the logits of all request-side tokens (S, labels, links, T), in position order.

    Args:
        assembler: The model with its link tokens and its adapter.
        prompt: The ids.
        sink_ids: The sink prefix that the documents' entries were encoded behind.
        order, masks: Replace what follows from the layout; only negative controls do.
    """
    runner = assembler.runner
    layout = prompt.layout(num_links=assembler.num_links)
    order = order or ReferenceOrder.of(layout, len(sink_ids))
    masks = masks or {window: order.mask(window=window.size) for window in runner.windows}
    at_position, sink = prompt.ids(layout), torch.tensor([0, *sink_ids])
    copies = order.source < 0
    behind = layout.behind_documents
    factor = None
    if behind is not None:
        factor = (~copies & (order.groups == 0) & (order.source >= behind)).to(runner.device, runner.dtype)[None]
    ids = torch.where(copies, sink[(-order.source).clamp(0, len(sink_ids))], at_position[order.source.clamp(min=0)])
    with torch.inference_mode():
        logits = runner.forward(
            cache=None,
            adapter=None if factor is None else assembler.adapter,
            factor=factor,
            inputs_embeds=assembler.embed(ids)[None],
            position_ids=order.positions.to(runner.device)[None],
            attention_mask=runner.masks(masks),
            logits_to_keep=0,
        )[0]
    return logits[(~copies & (order.groups == 0)).to(logits.device)]
