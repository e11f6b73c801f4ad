"""The official client against a live server: what the engine says, in the shapes that it expects."""

import json
from typing import Any

import openai
import pytest
from live import MODEL, Live

from kvlink.engine.sampling import SamplingParams

pytestmark = pytest.mark.enable_socket

ASKED = [{"role": "user", "content": "When does the office open?"}]
TEXTS = ("The office opens at seven.", "Bread is baked on Tuesdays.")
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12}


def chat(server: Live, messages: Any = ASKED, **options: Any) -> Any:
    """Ask through the official client."""
    return server.openai.chat.completions.create(messages=messages, **{**GREEDY, **options})


def test_a_chat_answers_what_the_engine_answers(server: Live) -> None:
    found = chat(server)
    wanted = server.served.engine.generate([], ASKED[0]["content"], max_new_tokens=12)
    assert found.choices[0].message.content == wanted.text
    assert found.choices[0].finish_reason == wanted.finish_reason
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (
        wanted.usage.prompt_tokens,
        wanted.usage.completion_tokens,
    )
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert found.usage.model_extra["kvlink"]["mode"] == "exact"
    assert found.model == MODEL


def test_a_stream_is_the_answer_piece_by_piece_and_ends_with_its_usage(server: Live) -> None:
    whole = chat(server)
    chunks = list(chat(server, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in list(chat(server, stream=True)))


def test_inline_documents_are_reused_and_named_in_the_usage(server: Live) -> None:
    documents = [{"title": "", "text": text} for text in TEXTS]
    chat(server, extra_body={"documents": documents})
    found = chat(server, extra_body={"documents": documents})
    wanted = server.served.engine.generate(list(TEXTS), ASKED[0]["content"], max_new_tokens=12)
    assert found.choices[0].message.content == wanted.text
    block = found.usage.model_extra["kvlink"]
    assert block["mode"] == "documents"
    assert [row["tokens"] for row in block["documents"]] == [len(text) + 2 for text in TEXTS]
    assert found.usage.prompt_tokens_details.cached_tokens >= sum(len(text) for text in TEXTS)


def test_documents_stand_first_in_the_last_turn(server: Live) -> None:
    """The answer is that of the same conversation by hand, and another one than with the documents elsewhere."""
    talk = [{"role": "system", "content": "Be brief."}, *ASKED, {"role": "assistant", "content": "At seven."}, *ASKED]
    found = chat(server, talk, logprobs=True, extra_body={"documents": [{"text": TEXTS[1]}]})
    engine = server.served.engine
    from kvlink.core.layout import Turn

    _, turns = engine.prompter.conversation(talk)
    sampling = SamplingParams(logprobs=0)
    options: dict[str, Any] = {"system": "Be brief.", "max_new_tokens": 12, "sampling": sampling}
    job = engine.job([TEXTS[1]], ASKED[0]["content"], history=[Turn((), turns[0])], **options)
    other = engine.job([TEXTS[1]], ASKED[0]["content"], **options)
    for one in (job, other):
        engine.submit(one)
        while not one.has_ended:
            one.wait(0.05)
    first = [one.pieces()[0].token.logprob for one in (job, other)]
    assert found.choices[0].message.content == job.answer.text
    assert found.choices[0].logprobs.content[0].logprob == pytest.approx(first[0], abs=1e-5)
    assert abs(first[0] - first[1]) > 1e-4


def test_the_next_turn_of_a_stateless_client_computes_only_what_is_new(server: Live) -> None:
    first = chat(server, max_tokens=4)
    talk = [*ASKED, {"role": "assistant", "content": first.choices[0].message.content}, *ASKED]
    cached = [chat(server, talk).usage.prompt_tokens_details.cached_tokens for _ in range(2)]
    assert cached[0] >= first.usage.prompt_tokens - 1  # all of the first turn
    assert cached[1] > cached[0]


def test_choices_have_seeds_of_their_own(server: Live) -> None:
    wild = {"temperature": 1.5, "n": 3, "seed": 5}
    one, same = (chat(server, **wild) for _ in range(2))
    texts = [choice.message.content for choice in one.choices]
    assert [choice.index for choice in one.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in same.choices]
    assert chat(server, **wild | {"seed": 6, "n": 1}).choices[0].message.content == texts[1]
    streamed = ["", "", ""]
    for chunk in chat(server, stream=True, **wild):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_an_answer_ends_before_a_stop_string(server: Live) -> None:
    whole = chat(server).choices[0].message.content
    stop = whole[4:6]
    found = chat(server, stop=[stop]).choices[0]
    assert found.message.content == whole[: whole.index(stop)]
    assert found.finish_reason == "stop"


def test_logprobs_stand_beside_every_token(server: Live) -> None:
    whole = chat(server, logprobs=True, top_logprobs=3)
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == token.logprob  # greedy: the likeliest was taken
        assert token.logprob <= 0
    streamed = [
        token
        for chunk in chat(server, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert [token.logprob for token in streamed] == pytest.approx([token.logprob for token in content], abs=1e-5)


def test_penalties_change_the_answer(server: Live) -> None:
    plain = chat(server, max_tokens=40).choices[0].message.content
    assert chat(server, max_tokens=40, frequency_penalty=2, presence_penalty=2).choices[0].message.content != plain


def test_an_answer_follows_a_json_schema(server: Live) -> None:
    schema = {
        "type": "object",
        "properties": {"open": {"type": "boolean"}},
        "required": ["open"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "hours", "schema": schema, "strict": True}}
    found = chat(server, max_tokens=400, response_format=wanted).choices[0]
    assert found.finish_reason == "stop"
    assert set(json.loads(found.message.content)) == {"open"}


def test_a_completion_goes_on_with_a_text_as_it_stands(server: Live) -> None:
    found = server.openai.completions.create(prompt=["The office", "Bread"], logprobs=2, **GREEDY)
    engine = server.served.engine
    ids = [*engine.prompter.sink_ids("bos"), *engine.prompter.plain_ids("Bread")]
    import torch

    with torch.inference_mode():
        logits = engine.runner.model(torch.tensor([ids])).logits[0, -1]
    logprob, token = logits.log_softmax(-1).max(-1)
    assert [choice.index for choice in found.choices] == [0, 1]
    assert found.choices[1].logprobs.token_logprobs[0] == pytest.approx(float(logprob), abs=1e-5)
    assert found.choices[1].logprobs.tokens[0] == server.served.token_text(int(token))
    streamed = server.openai.completions.create(prompt="Bread", stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in streamed) == found.choices[1].text


def test_models_are_listed(server: Live) -> None:
    assert [model.id for model in server.openai.models.list()] == [MODEL]
    assert server.openai.models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"audio": {"voice": "a", "format": "wav"}}, "audio"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"extra_body": {"top_k": 3}}, "top_k"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages.0"),
        ({"messages": [*ASKED, *ASKED]}, "user and assistant in turn"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"max_tokens": 10**6}, "context"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
            "schema",
        ),
    ],
)
def test_what_is_not_carried_out_is_refused_by_name(server: Live, options: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError, match=named) as refused:
        chat(server, **options)
    assert refused.value.body["type"] == "invalid_request_error"


def test_what_says_nothing_is_no_reason_to_refuse(server: Live) -> None:
    content = [{"type": "text", "text": ASKED[0]["content"]}]
    neutral = chat(server, [{"role": "user", "content": content}], tools=[], logit_bias={}, user="somebody")
    assert neutral.choices[0].message.content == chat(server).choices[0].message.content


def test_errors_have_the_status_of_their_kind(server: Live) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        chat(server, model="other")
    with pytest.raises(openai.NotFoundError, match="nothing"):
        chat(server, extra_body={"documents": ["nothing"]})
    with pytest.raises(openai.BadRequestError) as refused:
        chat(server, max_tokens=10**6)
    assert refused.value.code == "context_length_exceeded"
