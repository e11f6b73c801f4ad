"""Sets of the hub, each in its own public layout, given in the one form that `data` reads.

A set is named `owner/name`, `owner/name/config` or either with `:split`. Its layout is told by the fields of a row,
never by the name; a layout that is not known is refused. Only this module knows `datasets`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from kvlink.core.errors import InputError
from kvlink.core.scores import normalise

SPLIT = "validation"
"""The split of a name that says none."""

CONVERTED = "refs/convert/parquet"
"""The hub's own copy of a set that was published as a script, which `datasets` does not run any more."""

SUMMARIZE_NEWS = "Write a one-page summary of all news."
SUMMARIZE_DIALOGUE = "Summarize the dialogue into a few short sentences."
"""What is asked of a set that holds no questions."""

Given = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HubName:
    """What a name of the hub says: `owner/name[/config][:split]`."""

    dataset: str
    config: str | None
    split: str


def parse_name(name: str) -> HubName:
    """Return the parts of a name: up to two are owner and name, a third one is the config.

    Raises:
        InputError: It has another form.
    """
    path, colon, split = name.partition(":")
    parts = path.split("/")
    if not all(parts) or len(parts) > 3 or (colon and not split):
        raise InputError(
            f"{name!r} is no file here, and no name of the hub: owner/name, owner/name/config, or either with :split"
        )
    return HubName("/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split or SPLIT)


def hub_rows(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where a row stands (set and number), and the row as `{"id", "question", "documents", "answers", ...}`.

    Ids that come again get a number, so that no two rows share one.

    Raises:
        InputError: `datasets` is not installed, the hub cannot be asked, or the layout is none of those known.
    """
    seen = Counter[str]()
    for number, given in enumerate(_load(name, parse_name(name))):
        where = f"{name}:{number}"
        row = _layout(given, where).read(given, where)
        ids = [given.get(field) for field in ("id", "_id", "question_id")]
        own = next((str(one) for one in ids if one not in (None, "")), where)
        seen[own] += 1
        yield where, {**row, "id": own if seen[own] == 1 else f"{own}#{seen[own]}"}


def _load(name: str, parts: HubName) -> Iterable[Given]:
    try:
        datasets: Any = import_module("datasets")
    except ImportError as error:
        raise InputError(
            f"{name!r} is no file here; to read it as a data set of the hub, install kvlink[data], or give a path"
        ) from error
    try:
        try:
            return datasets.load_dataset(parts.dataset, parts.config, split=parts.split)
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            return datasets.load_dataset(parts.dataset, parts.config, split=parts.split, revision=CONVERTED)
    except Exception as error:  # its errors, those of the hub and those of HTTP have no common base
        raise InputError(
            f"the hub's data set {name!r} cannot be read: {error}; name it owner/name/config:split, or give a path"
        ) from error


@dataclass(frozen=True, slots=True)
class _Layout:
    """Fields by which a layout is known, and how its rows are read."""

    fields: tuple[str, ...]
    read: Callable[[Given, str], dict[str, Any]]


def _layout(given: Given, where: str) -> _Layout:
    for layout in LAYOUTS:
        if given.keys() >= {*layout.fields}:
            return layout
    known = "; ".join(", ".join(layout.fields) for layout in LAYOUTS)
    raise InputError(
        f"{where} has the fields {', '.join(sorted(given))}: no layout that is known ({known}); write its rows as JSON "
        "Lines (docs/how-to/evaluate.md) and give the path"
    )


def _own(given: Given, where: str) -> dict[str, Any]:
    """Read a row that has the form of a file already."""
    documents = given["documents"]
    return (
        {**given, "documents": _records(documents, where, "documents")} if isinstance(documents, Mapping) else {**given}
    )


def _passages(given: Given, where: str) -> dict[str, Any]:
    """Read retrieved passages: Natural Questions after Liu et al. 2023 (Lost in the Middle); gold is marked."""
    passages = _records(given["ctxs"], where, "ctxs")
    documents = [(passage.get("title"), passage.get("text")) for passage in passages]
    gold = next((found for mark in ("isgold", "hasanswer") if (found := _marked(passages, mark))), None)
    return _qa(given, documents, _texts(given["answers"], where, "answers"), gold)


def _paragraphs(given: Given, where: str) -> dict[str, Any]:
    """Read MuSiQue: paragraphs of which some support the answer. What they do not answer has no answers."""
    paragraphs = _records(given["paragraphs"], where, "paragraphs")
    steps = _records(given.get("question_decomposition"), where, "question_decomposition")
    named = {step.get("paragraph_support_idx") for step in steps} - {None}
    gold = _marked(paragraphs, "is_supporting") or [
        at for at, paragraph in enumerate(paragraphs) if paragraph.get("idx", at) in named
    ]
    answers = [given.get("answer"), *_texts(given.get("answer_aliases"), where, "answer_aliases")]
    documents = [(paragraph.get("title"), paragraph.get("paragraph_text")) for paragraph in paragraphs]
    return _qa(given, documents, [] if given.get("answerable") is False else answers, gold or None)


def _pages(given: Given, where: str) -> dict[str, Any]:
    """Read TriviaQA: pages that a search found, then pages of Wikipedia; gold are those that hold an alias."""
    found, pages = (_records(given[field], where, field) for field in ("search_results", "entity_pages"))
    documents = [
        *((page.get("title"), page.get("search_context") or page.get("description")) for page in found),
        *((page.get("title"), page.get("wiki_context")) for page in pages),
    ]
    answer = _object(given["answer"], where, "answer")
    answers = [answer.get("value"), *_texts(answer.get("aliases"), where, "answer.aliases")]
    wanted = [f" {normalise(alias)} " for alias in answers if isinstance(alias, str) and normalise(alias)]
    texts = [f" {normalise(text)} " if isinstance(text, str) else "" for _, text in documents]
    gold = [at for at, text in enumerate(texts) if any(alias in text for alias in wanted)]
    return _qa(given, documents, answers, gold if wanted else None)


def _hops(given: Given, where: str) -> dict[str, Any]:
    """Read HotpotQA and 2WikiMultihopQA: titles with sentences, and facts that name titles; both perhaps as JSON."""
    articles = _records(given["context"], where, "context", pair=("title", "sentences"))
    facts = _records(given["supporting_facts"], where, "supporting_facts", pair=("title", "sent_id"))
    titles = [fact.get("title") for fact in facts]
    gold = [at for at, article in enumerate(articles) if article.get("title") in titles]
    documents = [
        (article.get("title"), _joined(article.get("sentences", article.get("content")))) for article in articles
    ]
    return _qa(given, documents, [given.get("answer")], gold or None)


def _passage(given: Given, where: str) -> dict[str, Any]:
    """Read SQuAD: one passage, which holds the answer if there is one."""
    answers = [answer.get("text") for answer in _records(given["answers"], where, "answers")]
    return _qa(given, [(given.get("title"), given["context"])], answers, [0] if answers else None)


def _news(given: Given, where: str) -> dict[str, Any]:
    """Read Multi-News: reports with bars between them, and a summary of all."""
    found = given["document"]
    reports = [report.strip() for report in found.split("|||||")] if isinstance(found, str) else [found]
    return _summary([report for report in reports if report not in (None, "")], given["summary"], SUMMARIZE_NEWS)


def _dialogue(given: Given, where: str) -> dict[str, Any]:
    """Read SAMSum: a dialogue and its summary."""
    return _summary([given["dialogue"]], given["summary"], SUMMARIZE_DIALOGUE)


LAYOUTS = (
    _Layout(("question", "documents", "answers"), _own),
    _Layout(("question", "ctxs", "answers"), _passages),
    _Layout(("question", "paragraphs"), _paragraphs),
    _Layout(("question", "search_results", "entity_pages", "answer"), _pages),
    _Layout(("question", "context", "supporting_facts"), _hops),
    _Layout(("question", "context", "answers"), _passage),
    _Layout(("document", "summary"), _news),
    _Layout(("dialogue", "summary"), _dialogue),
)
"""The layouts that are known; the first whose fields a row has is taken."""


def _qa(given: Given, documents: Sequence[tuple[Any, Any]], answers: Sequence[Any], gold: Any) -> dict[str, Any]:
    return {
        "question": given["question"],
        "documents": [{"title": title, "text": "" if text is None else text} for title, text in documents],
        "answers": _answers(answers),
        "gold": gold,
    }


def _summary(texts: Sequence[Any], summary: Any, question: str) -> dict[str, Any]:
    documents = [{"title": "", "text": "" if text is None else text} for text in texts]
    return {"question": question, "documents": documents, "answers": _answers([summary]), "task": "summarization"}


def _answers(given: Sequence[Any]) -> list[Any]:
    """Return each answer once, without missing and blank ones; what is no text is refused where rows are parsed."""
    found: list[Any] = []
    for answer in given:
        if answer not in found and answer is not None and str(answer).strip():
            found.append(answer)
    return found


def _marked(records: Sequence[Given], mark: str) -> list[int]:
    return [at for at, record in enumerate(records) if record.get(mark)]


def _records(value: Any, where: str, field: str, *, pair: tuple[str, str] | None = None) -> list[Given]:
    """Return a list of objects, however a set holds it: as that, as an object of lists, as pairs, or any of it as JSON.

    Args:
        pair: Names of the two parts where the list may hold pairs.

    Raises:
        InputError: It is something else.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InputError(f"{where}: {field} is a text that is no JSON: {error}") from error
    if value is None:
        return []
    if isinstance(value, Mapping):
        columns = cast("dict[str, Any]", {name: column for name, column in value.items() if column is not None})
        if all(isinstance(column, list) for column in columns.values()) and len(set(map(len, columns.values()))) < 2:
            return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    elif isinstance(value, list):
        items = [_named(item, pair) for item in cast("list[Any]", value)]
        if all(isinstance(item, Mapping) for item in items):
            return items
    raise InputError(f"{where}: {field} is {_kind(value)}, a list of objects or an object of lists is needed")


def _named(item: Any, pair: tuple[str, str] | None) -> Any:
    """Return a pair as an object, and anything else as it is."""
    parts = cast("list[Any]", item) if isinstance(item, list) else []
    return dict(zip(pair, parts, strict=True)) if pair and len(parts) == 2 else item


def _object(value: Any, where: str, field: str) -> Given:
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return cast("Given", value)
    raise InputError(f"{where}: {field} is {_kind(value)}, an object is needed")


def _texts(value: Any, where: str, field: str) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, list):
        return cast("list[Any]", value)
    raise InputError(f"{where}: {field} is {_kind(value)}, a list is needed")


def _kind(value: Any) -> str:
    return type(value).__name__


def _joined(sentences: Any) -> Any:
    """Return sentences as one text, with a space between two where the set has none."""
    if not isinstance(sentences, list):
        return sentences
    text = ""
    for sentence in cast("list[Any]", sentences):
        if not isinstance(sentence, str):
            return sentence
        space = " " if text and sentence and not (text[-1].isspace() or sentence[0].isspace()) else ""
        text += space + sentence
    return text
