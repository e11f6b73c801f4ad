"""Known beginnings: one radix tree over the items of prompts that holds keys and values of request-side tokens.

A prompt that begins like an earlier one computes only what is new: other documents behind the same ones, another
question, the next turn of a conversation. Each node stands for one item, or for a part of a run of ids; a run that
goes on otherwise in the middle of a node splits it. Knows no text, no store, no model and no clock.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, final

from jaxtyping import Float
from torch import Tensor

from kvlink.engine.items import Entry, Item, Run, behind, edge, merged, num_rows
from kvlink.engine.tree import Node, Place, Rows, best_order, cut, follow, reach, rows_of, settle, upwards


@dataclass(slots=True, eq=False)
class Match:
    """The longest known beginning of a prompt, under lease until `release`: a context manager.

    Attributes:
        num_rows: Request-side tokens whose keys and values are known: the first ones of the prompt.
        num_tokens: Positions up to the last of them, entries and links counted.
        pieces: Keys `[layers, kv_heads, n, head_dim]` and values of these rows, in order. Not to be written to, and
            gone with the release.
    """

    num_rows: int
    num_tokens: int
    pieces: tuple[tuple[Tensor, Tensor], ...]
    ending: ExitStack = field(default_factory=ExitStack, repr=False)

    def copy_into(
        self,
        keys: Float[Tensor, "layers kv_heads capacity head_dim"],
        values: Float[Tensor, "layers kv_heads capacity value_dim"],
    ) -> None:
        """Copy the known rows into the first rows of a request's own buffer.

        Raises:
            ValueError: The buffer has fewer rows.
        """
        if min(keys.shape[2], values.shape[2]) < self.num_rows:
            raise ValueError(f"{self.num_rows} rows are known, but the buffer holds {keys.shape[2]}; make it larger")
        at = 0
        for piece_keys, piece_values in self.pieces:
            stop = at + piece_keys.shape[2]
            keys[:, :, at:stop], values[:, :, at:stop] = piece_keys, piece_values
            at = stop

    def release(self) -> None:
        """End the lease. A second time does nothing."""
        self.pieces = ()
        self.ending.close()

    def __enter__(self) -> "Match":
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginningsStats:
    """What the tree holds, and what happened since it was made.

    Attributes:
        nodes: Nodes that hold rows.
        used_bytes, budget_bytes: Real bytes; what only a lease holds is counted, too.
        leased_bytes: The part that cannot be evicted now.
        lookups: Calls of `match`.
        hit_rows: Rows that were found in them.
        evictions: Nodes dropped to make room.
    """

    nodes: int
    used_bytes: int
    budget_bytes: int
    leased_bytes: int
    lookups: int
    hit_rows: int
    evictions: int


@final
class Beginnings:
    """The tree of known beginnings. All methods may be called from any thread.

    Whatever changes a number of a prompt's keys and values must stand in its items or in its root: a tuple of the
    model's digest, that of the adapter in use, the scope. What differs there shares nothing.

    The budget is hard. The least recently used leaves go first, a node only after all below it, and a node that stands
    under lease, or above one that does, never. Whole nodes are kept or dropped.
    """

    def __init__(self, *, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"the budget of known beginnings is {budget_bytes} bytes; 0 keeps none")
        self._budget_bytes = budget_bytes
        self._lock = Lock()
        self._top = Node(None, Run(()), None)
        # Least recently used first. All nodes of a path are moved to the end at once, the deepest first: so each
        # node stands before its parent, and the first one that is not leased is always a leaf.
        self._order: OrderedDict[Node, None] = OrderedDict()
        self._used_bytes = 0
        self._counts = Counter(lookups=0, hit_rows=0, evictions=0)

    def match(self, root: Hashable, items: Sequence[Item], *, at_most: int | None = None) -> Match:
        """Return the longest known beginning of a prompt; release it when its rows have been read.

        Args:
            root: Who shares.
            at_most: Rows that may be returned: all but the last where the prompt's logits are needed.
        """
        left = num_rows(items) if at_most is None else at_most
        pieces: list[tuple[Node, int]] = []
        at = num_tokens = 0
        with self._lock:
            for place, count in follow(self._start(root), items):
                taken = min(count, left) if isinstance(place.node.item, Run) else count
                at += taken
                if place.node.rows is None:
                    continue
                if not 0 < taken <= left:
                    break
                pieces.append((place.node, taken))
                left -= taken
                num_tokens = at
            rows = sum(taken for _, taken in pieces)
            self._counts.update(lookups=1, hit_rows=rows)
            ending = self._lend([node for node, _ in pieces])
            return Match(rows, num_tokens, tuple(rows_of(node).first(taken) for node, taken in pieces), ending)

    def insert(
        self,
        root: Hashable,
        items: Sequence[Item],
        keys: Float[Tensor, "layers kv_heads rows head_dim"],
        values: Float[Tensor, "layers kv_heads rows value_dim"],
    ) -> None:
        """Keep copies of rows that are not known yet, the first ones where there is no room for all.

        Entries below which nothing was kept leave no trace. A split, too, needs room for its copies.

        Args:
            root: Who shares.
            items: What was computed, from the beginning of the prompt.
            keys: All request-side rows of the items, in order, rotated at their positions in the prompt.
            values: Their values.

        Raises:
            ValueError: The items have another number of rows.
        """
        if not num_rows(items) == keys.shape[2] == values.shape[2]:
            raise ValueError(
                f"the items have {num_rows(items)} request-side tokens, but there are {keys.shape[2]} rows of keys and "
                f"{values.shape[2]} of values; hand over all rows from the beginning of the prompt"
            )
        with self._lock:
            start = self._start(root)
            self._top.children[root] = start.node
            place, at, _ = reach(start, items)
            self._extend(place, behind(merged(items), at), Rows(keys, values))

    def longest(
        self,
        root: Hashable,
        head: Sequence[Item],
        documents: Sequence[Sequence[Item]],
        *,
        labels: Sequence[Run] = (),
    ) -> list[int]:
        """Return the order of documents that follows what is known longest; the others come behind, in their order.

        All paths of the tree that these documents can make are searched, each place once.

        Args:
            root: Who shares.
            head: What stands before the documents: S.
            documents: For each document its entries and what stands behind each of them.
            labels: For each place in the order the run before the document that takes it; empty for none.

        Raises:
            ValueError: Labels and documents differ in number.
        """
        if labels and len(labels) != len(documents):
            raise ValueError(f"there are {len(labels)} labels for {len(documents)} documents; hand over one per place")
        with self._lock:
            best = best_order(self._start(root), head, documents, labels)
        return [*best, *(index for index in range(len(documents)) if index not in best)]

    def drop_entries(self, names: Collection[str]) -> None:
        """Drop everything behind entries of these names, under all roots and codecs.

        It is not found from now on; what is under lease is freed when the leases end. A request that still runs on such
        an entry must not insert afterwards.
        """
        gone = frozenset(names)
        with self._lock:
            nodes = [self._top]
            while nodes:
                for child in tuple(nodes.pop().children.values()):
                    if isinstance(child.item, Entry) and child.item.name in gone:
                        self._drop(child)
                    else:
                        nodes.append(child)

    def clear(self) -> None:
        """Drop everything; what is under lease is freed when the leases end."""
        with self._lock:
            for child in tuple(self._top.children.values()):
                self._drop(child)

    def stats(self) -> BeginningsStats:
        """Return what the tree holds and what happened."""
        with self._lock:
            idle_bytes = sum(rows_of(node).num_bytes for node in self._order if not node.leases)
            return BeginningsStats(
                nodes=len(self._order),
                used_bytes=self._used_bytes,
                budget_bytes=self._budget_bytes,
                leased_bytes=self._used_bytes - idle_bytes,
                **self._counts,
            )

    def _start(self, root: Hashable) -> Place:
        """Return the place of a root; a new root is not in the tree yet."""
        return Place(self._top.children.get(root) or Node(root, Run(()), self._top), 0)

    def _lend(self, path: Sequence[Node]) -> ExitStack:
        """Lease what was found, as the most recently used; return what ends the lease."""
        ending = ExitStack()
        if path:
            last, lent = path[-1], [rows_of(node) for node in path]
            for rows in lent:
                rows.holders += 1
            settle(last, leases=1)
            self._touch(last)
            ending.callback(self._give_back, last, lent)
        return ending

    def _give_back(self, last: Node, lent: Sequence[Rows]) -> None:
        with self._lock:
            for rows in lent:
                self._let_go(rows)
            settle(last, leases=-1)

    def _extend(self, place: Place, rest: list[Item], given: Rows) -> None:
        """Put items below a place as far as there is room; their rows are the last ones of those given."""
        node, start = place.node, given.keys.shape[2] - num_rows(rest)
        settle(node, leases=1)  # nothing on the path may make room for what comes below it
        try:
            if rest and place.taken < len(node.item):
                front = self._split(node, place.taken)
                if front is None:
                    return
                node = front
            for item in cut(rest):
                rows = None
                if not isinstance(item, Entry):
                    rows = self._copied(given, start, start + len(item))
                    if rows is None:
                        return
                    start += len(item)
                node = Node(edge(item), item, node, rows, leases=1)
                self._attach(node)
        finally:
            settle(node, leases=-1)
            self._touch(node)

    def _split(self, node: Node, at: int) -> Node | None:
        """Cut a run in two and return the front, or None if there is no room for the copies.

        The node itself becomes the back, so that leases on it go on. The caller's own lease ends at the front.
        """
        old = rows_of(node)
        assert isinstance(node.item, Run), "only runs are cut"
        if not self._make_room(old.num_bytes):
            return None
        ids = node.item.ids
        front = Node(node.edge, Run(ids[:at]), node.parent, old.copy(0, at), leases=node.leases)
        node.edge, node.item, node.parent, node.rows = ids[at], Run(ids[at:]), front, old.copy(at, len(ids))
        node.leases -= 1
        self._used_bytes += old.num_bytes
        self._attach(front)
        front.children[node.edge] = node
        self._let_go(old)
        return front

    def _attach(self, node: Node) -> None:
        assert node.parent is not None, "the top is never attached"
        node.parent.children[node.edge] = node
        if node.rows is not None:
            self._order[node] = None

    def _copied(self, rows: Rows, start: int, stop: int) -> Rows | None:
        """Copy some rows, or return None if there is no room for them."""
        if not self._make_room(rows.num_bytes // rows.keys.shape[2] * (stop - start)):
            return None
        copy = rows.copy(start, stop)
        self._used_bytes += copy.num_bytes
        return copy

    def _make_room(self, size: int) -> bool:
        """Evict until `size` bytes fit. Where they cannot, nothing is evicted."""
        missing = self._used_bytes + size - self._budget_bytes
        victims: list[Node] = []
        for node in self._order:
            if missing <= 0:
                break
            if not node.leases:
                victims.append(node)
                missing -= rows_of(node).num_bytes
        if missing > 0:
            return False
        for node in victims:
            self._drop(node)
        self._counts["evictions"] += len(victims)
        return True

    def _drop(self, node: Node) -> None:
        """Take a node and all below it out of the tree."""
        parent = node.parent
        assert parent is not None, "the top is never dropped"
        del parent.children[node.edge]
        nodes = [node]
        while nodes:
            one = nodes.pop()
            nodes.extend(one.children.values())
            if one.rows is not None:
                del self._order[one]
                self._let_go(one.rows)
                one.rows = None  # nodes refer to each other, so their memory would wait for the collector
        settle(parent)

    def _let_go(self, rows: Rows) -> None:
        rows.holders -= 1
        if not rows.holders:
            self._used_bytes -= rows.num_bytes

    def _touch(self, node: Node) -> None:
        """Make a path the most recently used one, the deepest node first."""
        for one in upwards(node):
            if one in self._order:
                self._order.move_to_end(one)
