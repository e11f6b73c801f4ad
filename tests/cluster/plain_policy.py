"""The routing rules once more, slow and obvious: no index, no table, no arrays; and with faults planted on purpose."""

from collections.abc import Collection, Sequence
from functools import cache

from blake3 import blake3

MASK = (1 << 64) - 1


def mixed(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


@cache
def height(node: str, slot: int) -> int:
    seed = int.from_bytes(blake3(node.encode()).digest(8), "little")
    return mixed((slot * 0x9E3779B97F4A7C15) & MASK ^ seed)


@cache
def word(document: str, place: int) -> int:
    return int.from_bytes(blake3(document.encode()).digest(4 * place + 4)[-4:], "little")


class PlainTable:
    """Each slot belongs to the node with the highest hash."""

    def __init__(self, slots: int) -> None:
        self.slots = slots

    def owner(self, slot: int, nodes: Collection[str]) -> str:
        return max(nodes, key=lambda node: height(node, slot))

    def homes(self, document: str, wanted: int, nodes: Collection[str]) -> list[str]:
        if wanted == 1:
            return [self.owner(word(document, 0) % self.slots, nodes)]
        found: list[str] = []
        for place in range(2 * wanted + 8):
            owner = self.owner(word(document, place) % self.slots, nodes)
            if owner not in found and len(found) < wanted:
                found.append(owner)
        return found


class PlainAffinity:
    """What `Affinity` does, each time from all that has happened.

    Args:
        window: Requests of one generation, for any number of nodes.
        fault: Name of what is done wrong.
    """

    def __init__(self, *, gap: int, slots: int, window: int, fault: str = "") -> None:
        self.gap, self.window, self.fault, self.table = gap, window, fault, PlainTable(slots)
        self.queues: dict[str, int] = {}
        self.changed: dict[str, int] = {}
        self.born: dict[str, int] = {}
        self.held: dict[str, set[str]] = {}
        self.sessions: dict[str, tuple[str, int]] = {}
        self.generations: list[list[tuple[set[str], str, int]]] = [[], []]
        self.changes = 0

    def join(self, node: str) -> None:
        if node not in self.queues:
            self.changes += 1
            self.queues[node] = 0
            self.held.setdefault(node, set())
            self.changed[node] = self.born[node] = self.changes

    def leave(self, node: str) -> None:
        if self.fault != "dead":
            self.queues.pop(node, None)
        if node in self.held and self.fault != "remembers":
            self.held[node] = set()

    def homes(self, document: str) -> int:
        if self.fault == "one home":
            return 1
        requests = self.generations[0] + self.generations[1]
        count = sum(document in names for names, _, _ in requests)
        needed = count * len(self.queues) / max(len(requests), self.window)
        wanted = 1
        while wanted < needed:
            wanted *= 2
        return min(wanted, len(self.queues))

    def counts_at(self, document: str) -> set[str]:
        wanted = self.homes(document)
        known = {node for node in self.queues if document in self.held[node]}
        if self.fault == "blind":
            known = set()
        return known if len(known) >= wanted else known | set(self.table.homes(document, wanted, self.queues))

    def choose(
        self, documents: Sequence[tuple[str, int]], *, session: str | None = None, without: Collection[str] = ()
    ) -> str | None:
        nodes = [node for node in self.queues if node not in without]
        if not nodes:
            return None
        if len(self.generations[-1]) >= self.window:
            self.generations = [self.generations[-1], []]
        asked = {name for name, _ in documents}
        self.generations[-1].append((asked, "", 0))
        least = min(self.queues[node] for node in nodes)
        gap = self.gap + {"late": 1, "early": -1}.get(self.fault, 0)
        free = [node for node in nodes if self.queues[node] <= least + gap]
        stays = self.sessions.get(session or "")
        if stays and stays[0] in free and self.born[stays[0]] == stays[1] and self.fault != "restless":
            chosen = stays[0]
        else:
            free = [node for node in free if not self.has_had_enough(node)] or free
            places = {name: self.counts_at(name) for name, _ in documents}

            def order(node: str) -> tuple[float, int, int]:
                score = sum(tokens for name, tokens in documents if node in places[name])
                if self.fault == "relative load":
                    score /= 1 + self.queues[node]
                return -score, self.queues[node], self.changed[node]

            chosen = min(free, key=order)
        self.count(chosen, 1)
        self.generations[-1][-1] = asked, chosen, self.born[chosen]
        if session is not None:
            self.sessions[session] = chosen, self.born[chosen]
        return chosen

    def has_had_enough(self, node: str) -> bool:
        lives = [(node, life) for _, node, life in self.generations[0] + self.generations[1]]
        counts = {one: lives.count((one, self.born[one])) for one in self.queues}
        fair = sum(counts.values()) / len(counts)
        return self.fault != "greedy" and counts[node] > 1.25 * fair + 2 * fair**0.5

    def done(self, node: str, born: int) -> None:
        if node in self.queues and self.born[node] == born:
            self.count(node, -1)

    def note(self, node: str, document: str) -> None:
        if node in self.queues:
            self.held[node].add(document)

    def forget(self, document: str) -> None:
        for held in self.held.values():
            held.discard(document)

    def count(self, node: str, by: int) -> None:
        self.changes += 1
        self.queues[node] += by
        self.changed[node] = self.changes
