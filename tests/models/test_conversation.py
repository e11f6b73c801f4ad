"""Conversations as ids: pieces joined are what the chat template renders, as long as it lets them be."""

import pytest

import tiny
from kvlink.core.document import Document
from kvlink.core.errors import EmptyQuestion, InputError, ModelRefused
from kvlink.models.prompt import Prompter

FOREIGN_END = 0
"""`<|endoftext|>`, which ends answers in these tests, and which no template here puts behind one."""

QUESTIONS = ("What is it?", "Why is it so?", "And then?")
ANSWERS = ("The hen sits.", "It rains; 3 times.")
DOCUMENTS = (Document("The hut.", title="A"), Document("The egg\nof stone."))

OPENED = (
    "{% for m in messages %}{% set parts = m['content'].split('</think>') %}{{ '<|im_start|>' + m['role'] + '\n'"
    " + parts[-1] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""Thoughts: opened for a new answer, left out of an earlier one."""

CHANNELS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] }}{% if m['role'] == 'assistant' %}{{ '<|endoftext|>final' }}"
    "{% endif %}{{ '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
"""An earlier answer has a heading, with a control string in it, that a new one writes itself."""

UNMARKED = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
"""Turns in plain text: nothing ends an answer but the model's own end of sequence."""


def prompter_of(tokenizer):
    return Prompter(tokenizer=tokenizer, end_ids=(FOREIGN_END,))


def messages_of(questions, answers, system=None):
    spoken = [{"role": "system", "content": system}] if system is not None else []
    for question, answer in zip(questions, (*answers, None), strict=True):
        spoken.append({"role": "user", "content": question})
        if answer is not None:
            spoken.append({"role": "assistant", "content": answer})
    return spoken


def rendered(tokenizer, questions, answers, system=None):
    return tokenizer.apply_chat_template(
        messages_of(questions, answers, system), tokenize=False, add_generation_prompt=True
    )


def joined(system_ids, tails):
    return [*system_ids, *(i for tail in tails for i in tail)]


def as_generated(prompter, end, answers=ANSWERS, questions=QUESTIONS):
    """Return T A N of all turns but the last, then its T."""
    generated = [(*prompter.plain_ids(answer), *end) for answer in answers]
    earlier = [prompter.turn_ids(q, ids) for q, ids in zip(questions[:-1], generated, strict=True)]
    return [*earlier, prompter.tail_ids(questions[-1])]


# --- as the template renders it --------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [(2,), (FOREIGN_END,), ()], ids=["end of turn", "another end", "cut at its longest"])
@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize(
    "template", [tiny.CHATML, tiny.DATED, tiny.NO_SYSTEM, UNMARKED], ids=["chatml", "dated", "no system", "unmarked"]
)
def test_a_conversation_of_harmless_text_has_the_ids_of_the_whole_chat(template, system, end):
    tokenizer = tiny.byte_tokenizer(template)
    prompter = prompter_of(tokenizer)
    if template == tiny.NO_SYSTEM and system:
        with pytest.raises(InputError, match="refuses it"):
            prompter.conversation(messages_of(QUESTIONS, ANSWERS, system))
        return
    whole = tokenizer.encode(rendered(tokenizer, QUESTIONS, ANSWERS, system), add_special_tokens=False)
    answers = [f" {answer}" for answer in ANSWERS] if template == UNMARKED else ANSWERS  # behind `assistant:`
    assert joined(prompter.system_ids(system), as_generated(prompter, end, answers)) == whole
    assert joined(*prompter.conversation(messages_of(QUESTIONS, ANSWERS, system))) == whole


def test_documents_stand_first_in_the_turn_that_brings_them():
    tokenizer = tiny.byte_tokenizer()
    prompter = prompter_of(tokenizer)
    turns = as_generated(prompter, (2,))
    ids = list(prompter.system_ids())
    for document, turn in zip((None, *DOCUMENTS), turns, strict=True):
        ids += [*(prompter.document_ids(document) if document else ()), *turn]
    shown = [QUESTIONS[0], *(d.render() + q for d, q in zip(DOCUMENTS, QUESTIONS[1:], strict=True))]
    assert ids == tokenizer.encode(rendered(tokenizer, shown, ANSWERS), add_special_tokens=False)


@pytest.mark.parametrize("system", [None, "Be the best."])
@pytest.mark.parametrize("prefix", ["metaspace", "none"])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("end", [(2,), ()], ids=["end of turn", "cut at its longest"])
def test_a_conversation_reads_back_as_the_chat_where_turns_are_plain_text(kind, prefix, system, end):
    tokenizer = tiny.metaspace_tokenizer(kind, prefix=prefix)
    prompter = Prompter(tokenizer=tokenizer)
    chat = rendered(tokenizer, QUESTIONS, ANSWERS, system)
    spoken = [f" {answer}" for answer in ANSWERS]  # as a model goes on behind `[/INST]`
    assert tokenizer.decode(joined(prompter.system_ids(system), as_generated(prompter, end, spoken))) == chat
    assert tokenizer.decode(joined(*prompter.conversation(messages_of(QUESTIONS, ANSWERS, system)))) == chat


# --- the next turn begins as the one before it ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokenizer",
    [
        *(tiny.byte_tokenizer(template) for template in (tiny.CHATML, tiny.DATED, UNMARKED, OPENED, None)),
        tiny.metaspace_tokenizer("bpe"),
        tiny.metaspace_tokenizer("unigram", None),
    ],
    ids=["chatml", "dated", "unmarked", "thoughts", "no template", "metaspace", "metaspace, no template"],
)
def test_a_stateless_client_comes_to_the_ids_that_were_generated(tokenizer):
    prompter = Prompter(tokenizer=tokenizer)
    system_ids, (tail,) = prompter.conversation(messages_of(QUESTIONS[:1], ()))
    assert (system_ids, tail) == (prompter.system_ids(), prompter.tail_ids(QUESTIONS[0]))
    generated = (*prompter.plain_ids(" The hen sits."), *prompter.end_ids[:1])
    told = prompter.decode(generated)
    again, tails = prompter.conversation(messages_of(QUESTIONS[:2], [told]))
    assert again == system_ids
    assert tails == [prompter.turn_ids(QUESTIONS[0], generated), prompter.tail_ids(QUESTIONS[1])]
    assert tails[0][: len(tail) + len(generated) - 1] == (*tail, *generated[:-1])


def test_an_answer_with_its_end_is_kept_as_generated_and_n_follows():
    prompter = prompter_of(tiny.byte_tokenizer())
    generated = (*prompter.plain_ids("Yes."), 2)
    assert prompter.decode(prompter.next_turn_ids()) == "\nuser\n"
    assert prompter.answered_ids(generated) == (*generated, *prompter.next_turn_ids())
    assert prompter.answered_ids(()) == (2, *prompter.next_turn_ids())


def test_an_end_that_the_template_sets_apart_by_a_space_is_not_written_twice():
    prompter = Prompter(tokenizer=tiny.metaspace_tokenizer("bpe"))
    assert prompter.decode((*prompter.plain_ids("A"), *prompter.next_turn_ids())) == "A[INST] "
    bare, spaced = prompter.plain_ids(" A"), prompter.plain_ids(" A ")
    assert prompter.answered_ids((*bare, 2)) == prompter.answered_ids((*spaced, 2)) == prompter.answered_ids(bare)


def test_without_a_template_questions_and_answers_follow_each_other_between_empty_lines():
    tokenizer = tiny.byte_tokenizer(None)
    prompter = Prompter(tokenizer=tokenizer)
    _, tails = prompter.conversation(messages_of(QUESTIONS[:2], ["A hen."]))
    text = "\nQuestion: What is it?\nAnswer: A hen.\n\nQuestion: Why is it so?\nAnswer:"
    assert prompter.decode(joined((), tails)) == text
    assert tails[0] == prompter.turn_ids(QUESTIONS[0], prompter.answer_ids("A hen."))


def test_thoughts_that_a_template_would_leave_out_stay_as_they_were_generated():
    tokenizer = tiny.byte_tokenizer(OPENED)
    prompter = Prompter(tokenizer=tokenizer)
    turn = prompter.turn_ids("Why?", (*prompter.plain_ids("Hm.</think>So."), 2))
    assert prompter.decode(turn) == "Why?\nassistant\n<think>\nHm.</think>So.\nuser\n"
    assert "think" not in rendered(tokenizer, ("Why?", "x"), ("Hm.</think>So.",)).removesuffix("<think>\n")


def test_a_heading_that_an_earlier_answer_has_is_the_templates_and_may_hold_control_ids():
    tokenizer = tiny.byte_tokenizer(CHANNELS)
    prompter = Prompter(tokenizer=tokenizer)
    whole = tokenizer.encode(rendered(tokenizer, QUESTIONS, ANSWERS), add_special_tokens=False)
    assert joined(*prompter.conversation(messages_of(QUESTIONS, ANSWERS))) == whole
    assert 0 in whole


def test_a_system_prompt_that_a_template_would_move_to_the_last_turn_stays_where_it_was():
    """As Mistral's does; moved, nothing that was computed could be used again."""
    template = tiny.INST.replace("loop.first", "loop.last")
    tokenizer = tiny.metaspace_tokenizer("bpe", template)
    prompter = Prompter(tokenizer=tokenizer)
    _, (tail,) = prompter.conversation(messages_of(QUESTIONS[:1], (), "Be brief."))
    system_ids, tails = prompter.conversation(messages_of(QUESTIONS[:2], ["A hen."], "Be brief."))
    assert system_ids == prompter.system_ids("Be brief.")
    assert tails[0][: len(tail)] == tail
    assert prompter.decode(joined((), tails)) == "What is it? [/INST] A hen. [INST] Why is it so? [/INST]"


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[-1]['content'] }}", "the question of an earlier turn 0 times"),
        ("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}", "the answer of an earlier"),
        ("{% for m in messages | reverse %}{{ m['content'] }}{% endfor %}", "behind its question, 0 times"),
        ("{% for m in messages %}{{ m['content'] * (2 if m['role'] == 'assistant' else 1) }}{% endfor %}", "2 times"),
        ("{% if messages | length > 2 %}{{ raise_exception('one only') }}{% endif %}{{ messages[0].content }}", "one"),
    ],
    ids=["last message only", "no answers", "reversed", "twice", "raises"],
)
def test_a_template_without_a_place_for_a_second_turn_is_refused_for_conversations_only(template, reason):
    prompter = Prompter(tokenizer=tiny.byte_tokenizer(template))
    assert joined(*prompter.conversation(messages_of(QUESTIONS[:1], ())))
    for call in (
        prompter.next_turn_ids,
        lambda: prompter.turn_ids("Why?", (5,)),
        lambda: prompter.conversation(messages_of(QUESTIONS[:2], ANSWERS[:1])),
    ):
        with pytest.raises(ModelRefused, match=f"{reason}.*ask one question at a time"):
            call()


@pytest.mark.parametrize(
    "roles",
    [(), ("system",), ("assistant",), ("user", "user"), ("user", "assistant"), ("user", "system", "user"), ("tool",)],
    ids=" ".join,
)
def test_messages_in_another_order_are_an_error_that_shows_it(roles):
    prompter = prompter_of(tiny.byte_tokenizer())
    with pytest.raises(InputError, match=f"by {', '.join(roles) or 'nobody'};.*user last"):
        prompter.conversation([{"role": role, "content": "a"} for role in roles])


@pytest.mark.parametrize("content", [None, ["a"], 3])
def test_a_message_that_is_no_text_is_an_error(content):
    prompter = prompter_of(tiny.byte_tokenizer())
    with pytest.raises(InputError, match=f"by user is {type(content).__name__}"):
        prompter.conversation([{"role": "user", "content": content}])


def test_a_blank_question_of_any_turn_is_an_error():
    prompter = prompter_of(tiny.byte_tokenizer())
    for questions in (("", "b"), ("a", " ")):
        with pytest.raises(EmptyQuestion):
            prompter.conversation(messages_of(questions, ("c",)))


@pytest.mark.parametrize("control", tiny.CONTROL)
def test_control_strings_in_an_answer_that_a_client_sends_are_plain_text(control):
    prompter = prompter_of(tiny.byte_tokenizer())
    told, harmless = (
        joined(*prompter.conversation(messages_of(QUESTIONS[:2], [text]))) for text in (f"a{control}b", "harmless")
    )
    assert [i for i in told if i in prompter.control_ids] == [i for i in harmless if i in prompter.control_ids]
