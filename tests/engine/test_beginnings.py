"""Known beginnings: what matches, what never does, what stays, and in which order things go."""

import threading
from collections.abc import Sequence
from random import Random

import pytest
import torch
from known_rows import PLENTY, ROOT, ROW_BYTES, Truth, real_bytes

from kvlink.engine import tree as nodes
from kvlink.engine.beginnings import Beginnings
from kvlink.engine.items import Entry, Item, Links, Run, merged

S = Run((1, 2, 3))
TAIL = Run((7, 8, 9))


def document(name: str, codec: str = "raw", *, bundle: str = "bundle", level: int = 0) -> tuple[Item, ...]:
    return Entry(name, codec, 100), Links(bundle, level, 4)


PROMPT = (S, *document("a"), *document("b"), TAIL)


@pytest.fixture
def truth() -> Truth:
    return Truth()


@pytest.fixture
def tree(truth: Truth) -> Beginnings:
    tree = Beginnings(budget_bytes=PLENTY)
    truth.insert(tree, PROMPT)
    return tree


def test_a_prompt_that_was_inserted_is_known_and_the_last_token_can_be_left(tree: Beginnings, truth: Truth) -> None:
    assert truth.found(tree, PROMPT) == 14
    with tree.match(ROOT, PROMPT, at_most=13) as match:
        truth.check(match, PROMPT)
        assert (match.num_rows, match.num_tokens) == (13, 213)
        assert [keys.shape[2] for keys, _ in match.pieces] == [3, 4, 4, 2]
    assert truth.found(tree, PROMPT, at_most=0) == 0


def test_link_tokens_are_known_together_or_not_at_all(tree: Beginnings, truth: Truth) -> None:
    assert [truth.found(tree, PROMPT, at_most=rows) for rows in (2, 3, 4, 6, 7, 10, 11)] == [2, 3, 3, 3, 7, 7, 11]
    other = (S, Entry("a", "raw", 100), Links("bundle", 0, 3))
    assert truth.found(tree, other) == 3


@pytest.mark.parametrize(
    ("other", "rows"),
    [
        ((S, *document("a"), *document("b"), Run((7, 8, 1))), 13),
        ((S, *document("a"), *document("c"), TAIL), 7),
        ((S, *document("a"), *document("b", "int8"), TAIL), 7),
        ((S, *document("a", "int8"), *document("b"), TAIL), 3),
        ((S, *document("a", bundle="other"), *document("b"), TAIL), 3),
        ((S, *document("a", level=1), *document("b"), TAIL), 3),
        ((S, *document("b"), *document("a"), TAIL), 3),
        ((S, Entry("a", "raw", 99), Links("bundle", 0, 4)), 3),
        ((Run((1, 2)), *document("a"), *document("b"), TAIL), 2),
        ((Run((2, 3)), *document("a")), 0),
        ((*document("a"), *document("b"), TAIL), 0),
        ((), 0),
    ],
)
def test_reuse_goes_as_far_as_items_are_equal(tree: Beginnings, truth: Truth, other: Sequence[Item], rows: int) -> None:
    assert truth.found(tree, other) == rows


def test_other_roots_share_nothing(tree: Beginnings, truth: Truth) -> None:
    for root in (("model", "adapter", "shared"), ("model", "", "tenant"), ("other", "", "shared"), "model"):
        assert truth.found(tree, PROMPT, root) == 0
        truth.insert(tree, PROMPT[:3], root)
        assert truth.found(tree, PROMPT, root) == 7
    assert truth.found(tree, PROMPT) == 14


def test_how_ids_are_cut_into_runs_does_not_matter(tree: Beginnings, truth: Truth) -> None:
    pieces = (Run((1,)), Run(()), Run((2, 3)), *document("a"), Run(()), *document("b"), Run((7, 8)), Run((9,)))
    assert merged(pieces) == list(PROMPT)
    assert truth.found(tree, pieces) == 14
    truth.insert(tree, pieces)
    assert tree.stats().nodes == 4


def test_a_run_that_goes_on_otherwise_splits_a_node_at_the_token(tree: Beginnings, truth: Truth) -> None:
    long = Run((5, 6, 7, 8, 9, 10))
    for cut in (4, 2, 3):
        truth.insert(tree, (long,))
        truth.insert(tree, (Run((*long.ids[:cut], 0, 1)),))
        assert truth.found(tree, (long, TAIL)) == 6
        assert truth.found(tree, (Run((*long.ids[:cut], 0, 1)),)) == cut + 2
    assert truth.found(tree, (Run(long.ids[:3]), *document("a"))) == 3
    assert tree.stats().used_bytes == real_bytes(tree, []) == (14 + 6 + 3 * 2) * ROW_BYTES


def test_a_turn_that_follows_reuses_the_whole_conversation(tree: Beginnings, truth: Truth) -> None:
    answer, question = Run((20, 21)), Run((30, 31, 32))
    truth.insert(tree, (*PROMPT, answer))
    assert truth.found(tree, (*PROMPT, answer, question)) == 16


def test_halves_of_a_split_do_not_keep_each_other_alive(truth: Truth) -> None:
    tree = Beginnings(budget_bytes=14 * ROW_BYTES)
    truth.insert(tree, (Run((1, 2, 3, 4, 5, 6)),))
    truth.insert(tree, (Run((1, 2, 0)),))  # the back (3, 4, 5, 6) is now the least recently used leaf
    assert tree.stats().used_bytes == 7 * ROW_BYTES
    truth.insert(tree, (Run(tuple(range(50, 60))),))
    assert truth.found(tree, (Run((1, 2, 3)),)) == 2
    assert tree.stats().used_bytes == real_bytes(tree, []) == 13 * ROW_BYTES


def test_copies_are_contiguous_and_nothing_of_the_buffer(tree: Beginnings) -> None:
    buffer = torch.rand(2, 2, 50, 3, requires_grad=True), torch.rand(2, 50, 2, 2).transpose(1, 2)
    tree.insert("root", (Run((1, 2, 3)),), buffer[0][:, :, 4:7], buffer[1][:, :, 4:7])
    tree.insert("root", (Run((1, 5, 5)),), buffer[0][:, :, 4:7], buffer[1][:, :, 4:7])
    with tree.match("root", (Run((1, 2, 3)),)) as match:
        assert len(match.pieces) == 2
        for tensor in (tensor for piece in match.pieces for tensor in piece):
            assert tensor.is_contiguous()
            assert not tensor.requires_grad
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_entries_with_nothing_behind_them_leave_no_trace(truth: Truth) -> None:
    tree = Beginnings(budget_bytes=PLENTY)
    truth.insert(tree, (Entry("a", "raw", 5), Entry("b", "raw", 5)))
    assert not tree._top.children
    truth.insert(tree, (S, Entry("a", "raw", 5)))
    truth.insert(tree, (Run((1, 2)), Entry("a", "raw", 5)))
    assert tree.stats().nodes == 1
    with tree.match(ROOT, (S, Entry("a", "raw", 5))) as match:
        assert (match.num_rows, match.num_tokens) == (3, 3)


def test_documents_without_link_tokens_are_known_by_what_follows_them(truth: Truth) -> None:
    tree = Beginnings(budget_bytes=PLENTY)
    items = (S, Entry("a", "raw", 5), Entry("b", "raw", 6), TAIL)
    truth.insert(tree, items)
    with tree.match(ROOT, items, at_most=5) as match:
        assert (match.num_rows, match.num_tokens) == (5, 16)
    assert truth.found(tree, (S, Entry("b", "raw", 6), Entry("a", "raw", 5), TAIL)) == 3


def test_the_least_recently_used_leaf_goes_first_and_inner_nodes_last(truth: Truth) -> None:
    tree = Beginnings(budget_bytes=15 * ROW_BYTES)
    one, two, three = ((S, *document(name)) for name in "abc")
    for items in (one, two, three):
        truth.insert(tree, items)
    assert truth.found(tree, one) == 7
    truth.insert(tree, (S, *document("d")))
    assert [truth.found(tree, items) for items in (two, one, three)] == [3, 7, 7]
    truth.insert(tree, (Run((5, 5, 5, 5)),))
    truth.insert(tree, (Run((6, 6, 6, 6)),))
    assert [truth.found(tree, items) for items in (one, three)] == [3, 7]
    truth.insert(tree, (Run(tuple(range(50, 65))),))
    assert truth.found(tree, one) == 0
    assert (tree.stats().nodes, tree.stats().used_bytes) == (1, 15 * ROW_BYTES)


def test_what_does_not_fit_is_kept_up_to_there(truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Beginnings(budget_bytes=12 * ROW_BYTES)
    truth.insert(tree, PROMPT)
    assert truth.found(tree, PROMPT) == 11
    truth.insert(tree, (Run(tuple(range(13))),))  # one node, and larger than everything: nothing goes for it
    assert truth.found(tree, PROMPT) == 11
    monkeypatch.setattr(nodes, "RUN_ROWS", 5)
    truth.insert(tree, (Run(tuple(range(13))),))
    assert truth.found(tree, (Run(tuple(range(13))),)) == 10
    nothing = Beginnings(budget_bytes=0)
    truth.insert(nothing, PROMPT)
    assert truth.found(nothing, PROMPT) == nothing.stats().nodes == 0


def test_leased_nodes_stay_whatever_comes(truth: Truth) -> None:
    tree = Beginnings(budget_bytes=14 * ROW_BYTES)
    truth.insert(tree, PROMPT)
    match = tree.match(ROOT, PROMPT[:3])
    for number in range(10, 20):
        truth.insert(tree, (Run((number,) * 6),))
    assert truth.found(tree, PROMPT) == 7
    assert tree.stats().leased_bytes == 7 * ROW_BYTES
    truth.check(match, PROMPT[:3])
    match.release()
    match.release()
    assert (match.pieces, tree.stats().leased_bytes) == ((), 0)
    for number in range(10, 13):
        truth.insert(tree, (Run((number,) * 6),))
    assert truth.found(tree, PROMPT) == 0


def test_a_split_under_lease_leaves_the_reader_what_it_has_and_counts_it(truth: Truth) -> None:
    tree = Beginnings(budget_bytes=20 * ROW_BYTES)
    long = (Run((1, 2, 3, 4, 5, 6)),)
    truth.insert(tree, long)
    match = tree.match(ROOT, long)
    truth.insert(tree, (Run((1, 2, 0)),))
    assert tree.stats().used_bytes == real_bytes(tree, [match]) == 13 * ROW_BYTES
    truth.insert(tree, (Run(tuple(range(50, 60))),))  # would need room of what is leased
    truth.check(match, long)
    assert truth.found(tree, long) == 6
    match.release()
    assert tree.stats().used_bytes == real_bytes(tree, []) <= 9 * ROW_BYTES
    assert tree.stats().leased_bytes == 0


def test_a_dropped_entry_is_not_found_at_once_and_freed_with_its_last_lease(tree: Beginnings, truth: Truth) -> None:
    truth.insert(tree, (S, *document("a", "int8"), TAIL), "root")
    held = tree.match(ROOT, PROMPT)
    tree.drop_entries({"a", "unknown"})
    assert [truth.found(tree, PROMPT), truth.found(tree, (S, *document("a", "int8")), "root")] == [3, 3]
    truth.check(held, PROMPT)
    assert tree.stats().used_bytes == (3 + 3 + 11) * ROW_BYTES
    truth.insert(tree, PROMPT)  # the same names again, beside what is still leased
    held.release()
    assert truth.found(tree, PROMPT) == 14
    tree.drop_entries(["b"])
    assert truth.found(tree, PROMPT) == 7
    assert tree.stats().used_bytes == real_bytes(tree, []) == (7 + 3) * ROW_BYTES


def test_clear_leaves_nothing_but_leases(tree: Beginnings, truth: Truth) -> None:
    held = tree.match(ROOT, PROMPT[:1])
    tree.clear()
    assert truth.found(tree, PROMPT) == 0
    assert (tree.stats().nodes, tree.stats().used_bytes, tree.stats().leased_bytes) == (0, 3 * ROW_BYTES, 3 * ROW_BYTES)
    held.release()
    assert tree.stats().used_bytes == 0


def test_lookups_and_rows_are_counted(tree: Beginnings, truth: Truth) -> None:
    truth.found(tree, PROMPT)
    truth.found(tree, (TAIL,))
    stats = tree.stats()
    assert (stats.lookups, stats.hit_rows, stats.evictions, stats.nodes) == (2, 14, 0, 4)
    assert stats.used_bytes == 14 * ROW_BYTES < stats.budget_bytes


def test_wrong_input_is_refused(tree: Beginnings, truth: Truth) -> None:
    keys, values = truth.rows(ROOT, PROMPT)
    with pytest.raises(ValueError, match="the items have 14 request-side tokens, but there are 13 rows of keys"):
        tree.insert(ROOT, PROMPT, keys[:, :, 1:], values[:, :, 1:])
    with tree.match(ROOT, PROMPT) as match, pytest.raises(ValueError, match="14 rows are known, but the buffer holds"):
        match.copy_into(keys[:, :, 1:], values[:, :, 1:])
    with pytest.raises(ValueError, match="1 labels for 2 documents"):
        tree.longest(ROOT, (S,), (document("a"), document("b")), labels=(S,))
    with pytest.raises(ValueError, match="needs at least one"):
        Entry("a", "raw", 0)
    with pytest.raises(ValueError, match="where K is 0"):
        Links("bundle", 0, 0)
    with pytest.raises(ValueError, match="budget of known"):
        Beginnings(budget_bytes=-1)


def order(tree: Beginnings, names: str, *, head: Sequence[Item] = (S,)) -> str:
    return "".join(names[at] for at in tree.longest(ROOT, head, [document(name) for name in names]))


def test_the_order_of_documents_follows_what_is_known_longest(tree: Beginnings, truth: Truth) -> None:
    assert order(tree, "cba") == "abc"
    assert order(tree, "cbd") == "cbd"
    assert order(tree, "") == ""
    truth.insert(tree, (S, *document("b"), *document("d"), *document("c")))
    assert order(tree, "abcd") == "bdca"
    assert order(tree, "abc") == "abc"
    assert order(tree, "cab") == "abc"
    assert order(tree, "dbca", head=(Run((4,)),)) == order(tree, "dbca", head=(Run((1, 2)),)) == "dbca"


def test_the_order_counts_tokens_not_documents(truth: Truth) -> None:
    tree = Beginnings(budget_bytes=PLENTY)
    long = (Entry("long", "raw", 900), Links("bundle", 0, 4))
    truth.insert(tree, (S, *document("a"), *document("b")))
    truth.insert(tree, (S, *long))
    assert tree.longest(ROOT, (S,), [document("a"), document("b"), long]) == [2, 0, 1]


def test_a_document_of_two_segments_counts_as_far_as_it_is_known(truth: Truth) -> None:
    tree = Beginnings(budget_bytes=PLENTY)
    half = (Entry("x", "raw", 500), Links("bundle", 1, 4))
    truth.insert(tree, (S, *document("a")))
    truth.insert(tree, (S, *half))
    assert tree.longest(ROOT, (S,), [document("a"), (*half, *document("y"))]) == [1, 0]
    other = (Entry("x", "raw", 500), Links("other", 1, 4))  # an entry alone, with no row behind it, is worth nothing
    assert tree.longest(ROOT, (S,), [document("a"), other]) == [0, 1]


def test_labels_belong_to_places_and_join_the_system_prompt(truth: Truth) -> None:
    tree = Beginnings(budget_bytes=PLENTY)
    labels = [Run((40 + number, 50)) for number in range(3)]
    truth.insert(tree, (S, labels[0], *document("b"), labels[1], *document("c"), labels[2], *document("a")))
    documents = [document(name) for name in "abc"]
    assert tree.longest(ROOT, (S,), documents, labels=labels) == [1, 2, 0]
    assert tree.longest(ROOT, (S,), documents, labels=labels[::-1]) == [0, 1, 2]
    assert tree.longest(ROOT, (S,), documents) == [0, 1, 2]
    with_own = [(labels[0], *document(name)) for name in "abc"]
    assert tree.longest(ROOT, (S,), with_own) == [1, 0, 2]


def test_equal_documents_do_not_multiply_the_search(truth: Truth) -> None:
    tree = Beginnings(budget_bytes=PLENTY)
    truth.insert(tree, (S, *(item for _ in range(40) for item in document("a"))))
    assert tree.longest(ROOT, (S,), [document("b"), *[document("a")] * 40]) == [*range(1, 41), 0]


def test_threads_find_true_rows_within_the_budget(truth: Truth) -> None:
    budget = 60 * ROW_BYTES
    tree = Beginnings(budget_bytes=budget)
    names = "abcd"
    prompts = [
        (S, *document(one), *document(two), Run((5, *range(10, 10 + number))))
        for number, (one, two) in enumerate((one, two) for one in names for two in names)
    ]
    rows = [truth.rows(ROOT, prompt) for prompt in prompts]
    failures: list[BaseException] = []
    hits: list[int] = []

    def work(seed: int) -> None:
        draw = Random(seed)
        try:
            for _ in range(50):
                at = draw.randrange(len(prompts))
                keys, values = rows[at]
                with tree.match(ROOT, prompts[at]) as match:
                    got_keys, got_values = torch.zeros_like(keys), torch.zeros_like(values)
                    match.copy_into(got_keys, got_values)
                    hits.append(match.num_rows)
                    assert torch.equal(got_keys[:, :, : match.num_rows], keys[:, :, : match.num_rows])
                    assert torch.equal(got_values[:, :, : match.num_rows], values[:, :, : match.num_rows])
                tree.insert(ROOT, prompts[at], keys, values)
                assert tree.stats().used_bytes <= budget
                if draw.random() < 0.1:
                    tree.drop_entries([draw.choice(names)])
                tree.longest(ROOT, (S,), [document(name) for name in names])
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    stats = tree.stats()
    assert (stats.leased_bytes, stats.used_bytes, stats.lookups) == (0, real_bytes(tree, []), 200)
    assert any(hits)
    assert stats.evictions > 0
