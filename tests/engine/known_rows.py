"""Keys and values that say whose they are: each row's numbers name its root, all that stands before it, and itself."""

from collections.abc import Collection, Hashable, Iterator, Sequence

import torch
from torch import Tensor

from kvlink.engine.beginnings import Beginnings, Match
from kvlink.engine.items import Entry, Item, Run
from kvlink.engine.tree import rows_of

LAYERS, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 2, 3, 2
ROW_BYTES = LAYERS * KV_HEADS * (HEAD_DIM + VALUE_DIM) * 8
PLENTY = 1 << 30
ROOT = ("model", "", "shared")


def atoms(item: Item) -> Iterator[tuple[object, ...]]:
    """Yield what the positions of an item hold; independent of how items compare."""
    if isinstance(item, Run):
        yield from (("id", token) for token in item.ids)
    elif isinstance(item, Entry):
        yield ("entry", item.name, item.codec, item.num_tokens)
    else:
        yield from (("link", item.bundle, item.level, item.count, at) for at in range(item.count))


class Truth:
    """Numbers the beginnings of prompts; equal beginnings, however cut into items, have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Hashable, tuple[object, ...]], int] = {}

    def path(self, root: Hashable, items: Sequence[Item]) -> list[tuple[int, bool]]:
        """Return the number of each beginning, and whether it ends with a row."""
        number, found = self._number(-1, ("root", root)), []
        for item in items:
            for atom in atoms(item):
                number = self._number(number, atom)
                found.append((number, atom[0] != "entry"))
        return found

    def numbers(self, root: Hashable, items: Sequence[Item]) -> list[int]:
        """Return the numbers of the rows."""
        return [number for number, is_row in self.path(root, items) if is_row]

    def with_all_above(self, numbers: Collection[int]) -> set[int]:
        """Return the numbers and those of all beginnings of what they stand for."""
        found = set(numbers)
        for (before, _), number in reversed(self._numbers.items()):
            if number in found:
                found.add(before)
        return found

    def rows(self, root: Hashable, items: Sequence[Item]) -> tuple[Tensor, Tensor]:
        """Return keys and values of all rows."""
        numbers = torch.tensor(self.numbers(root, items), dtype=torch.float64)[:, None]
        heads = torch.arange(LAYERS * KV_HEADS, dtype=torch.float64).reshape(LAYERS, KV_HEADS, 1, 1) * 10
        keys = numbers * 1000 + heads + torch.arange(HEAD_DIM)
        values = -numbers * 1000 - heads - torch.arange(VALUE_DIM)
        return keys, values

    def insert(self, tree: Beginnings, items: Sequence[Item], root: Hashable = ROOT) -> None:
        """Insert what is true, then write over the buffer, as the next request does."""
        keys, values = self.rows(root, items)
        tree.insert(root, items, keys, values)
        keys.fill_(torch.nan)
        values.fill_(torch.nan)

    def check(self, match: Match, items: Sequence[Item], root: Hashable = ROOT) -> None:
        """Check every number of a match."""
        keys, values = self.rows(root, items)
        got_keys, got_values = (torch.full_like(tensor, torch.nan) for tensor in (keys, values))
        match.copy_into(got_keys, got_values)
        assert torch.equal(got_keys[:, :, : match.num_rows], keys[:, :, : match.num_rows])
        assert torch.equal(got_values[:, :, : match.num_rows], values[:, :, : match.num_rows])
        assert got_keys[:, :, match.num_rows :].isnan().all()

    def found(
        self, tree: Beginnings, items: Sequence[Item], root: Hashable = ROOT, *, at_most: int | None = None
    ) -> int:
        """Look up, check and release; return how many rows were known."""
        with tree.match(root, items, at_most=at_most) as match:
            self.check(match, items, root)
            return match.num_rows

    def _number(self, before: int, atom: tuple[object, ...]) -> int:
        return self._numbers.setdefault((before, atom), len(self._numbers))


def real_bytes(tree: Beginnings | None, matches: Sequence[Match]) -> int:
    """Return the bytes of all memory that a tree and matches keep alive, each piece of memory once."""
    nodes = () if tree is None else tree._order
    tensors = [tensor for node in nodes for tensor in (rows_of(node).keys, rows_of(node).values)]
    tensors += [tensor for match in matches for piece in match.pieces for tensor in piece]
    storages = {one.data_ptr(): one.nbytes() for one in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
