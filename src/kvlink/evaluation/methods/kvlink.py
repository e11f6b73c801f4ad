"""`kvlink`: entries laid side by side, with trained link tokens behind each document. The method of this project.

Source: arXiv 2502.16002 (KVLink), with one shared set of link tokens and a sink prefix.
"""

from kvlink.core.errors import BundleRefused
from kvlink.evaluation.case import Bench, Case, Ids
from kvlink.evaluation.methods.base import Method, Prefilled, one_of
from kvlink.evaluation.methods.reading import Reading
from kvlink.models.adapter import attention_layers
from kvlink.models.assembler import Assembler
from kvlink.models.bundle import Bundle, check_bundle, read_bundle, shipped_for


class KVLink(Method):
    """Entries with the link tokens, and the adapter if there is one, of a bundle."""

    def __init__(self, *, bundle: str = "auto", lora: str = "on", foreign: str = "no", codec: str = "raw") -> None:
        """Take a bundle.

        Args:
            bundle: A file, or `auto` for the one that ships for this model.
            lora: `off` leaves the bundle's adapter out, if it has one.
            foreign: `yes` takes a bundle of other weights of the same shape.
            codec: What the entries go through before they are used, as if they came from a store.
        """
        self.bundle = bundle
        self.lora = one_of(lora, "lora", "on", "off") == "on"
        self.foreign = one_of(foreign, "foreign", "yes", "no") == "yes"
        self._reading = Reading(codec)
        self._loaded: tuple[Bench, Bundle, Assembler] | None = None

    @property
    def facts(self) -> dict[str, int | str]:
        """K, and the rank of the adapter if one acts."""
        if self._loaded is None:
            return {}
        _, bundle, assembler = self._loaded
        rank = {"lora_rank": assembler.adapter.rank} if assembler.adapter else {}
        return {"links": bundle.links.num_links, **rank}

    def prepare(self, case: Case) -> None:
        """Encode the documents behind the bundle's sink prefix, cut where the links know segments, and S."""
        bundle, _ = self._of(case.bench)
        self._reading.entries(case, bundle.card.sink_ids, cut=bundle.links.levels > 1)
        case.bench.prefix(case.prompt.system)

    def prefill(self, case: Case, tail: Ids, *, keep: int, room: int = 0) -> Prefilled:
        """Lay out what is known and compute links and T."""
        bundle, assembler = self._of(case.bench)
        cut = bundle.links.levels > 1
        prompt = case.with_tail(tail, cut=cut)
        layout = prompt.layout(num_links=assembler.num_links)
        prefix = case.bench.prefix(case.prompt.system)
        entries, loaded = self._reading.entries(case, bundle.card.sink_ids, cut=cut)
        assert prefix is not None, "S is never empty"
        cache = assembler.assemble(layout, prefix=prefix, entries=entries, room=room)
        logits = assembler.prefill(cache, prompt, layout, logits_to_keep=keep)
        return Prefilled(logits, len(tail) + layout.num_link_tokens, loaded, cache)

    def _of(self, bench: Bench) -> tuple[Bundle, Assembler]:
        """Return the bundle and an assembler that uses it, loaded once per model."""
        if self._loaded is None or self._loaded[0] is not bench:
            runner = bench.runner
            found = shipped_for(bench.digest) if self.bundle == "auto" else read_bundle(self.bundle)
            if found is None:
                raise BundleRefused(
                    f"no link tokens ship for this model ({bench.digest[:12]}); train them with `kvlink train links` "
                    "and name the file: kvlink(bundle=FILE)"
                )
            shapes = {name: layer.weight.shape for name, layer in attention_layers(runner.model)}
            hidden = runner.embedding.embedding_dim
            check_bundle(found, digest=bench.digest, hidden=hidden, layers=shapes, foreign=self.foreign)
            adapter = found.adapter.to(runner.device, runner.dtype) if found.adapter and self.lora else None
            self._loaded = bench, found, Assembler(runner, links=found.links, adapter=adapter)
        return self._loaded[1:]
