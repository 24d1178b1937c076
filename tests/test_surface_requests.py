"""What requests may hold: cases 26, 35, 36, 38, 40 to 43, 45, 46, 49, 50 and 53."""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_process import HI, THINK_TEMPLATE, http_request, in_threads

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import exl3_serve as serve

CHAT = "/v1/chat/completions"
TEXT_TEMPLATE = tiny_model.CHAT_TEMPLATE  # takes strings and parts
PARTS_TEMPLATE = (  # takes parts only
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}<assistant>"
)
STRING_TEMPLATE = (  # takes strings only
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}\n{% endfor %}<assistant>"
)


def user(content):
    return {"role": "user", "content": content}


# ---- Case 26: history as clients send it back ----------------------------------------------------

CALL = {"id": "1", "type": "function", "function": {"name": "lookup", "arguments": '{"q":"a"}'}}
CALLED = {"role": "assistant", "tool_calls": [CALL]}
ANSWERED = {"role": "tool", "tool_call_id": "1", "content": "found"}


@pytest.mark.parametrize(
    "message",
    [CALLED, *(CALLED | {"content": content} for content in (None, "", []))],
    ids=["missing", "null", "empty", "no-parts"],
)
def test_a_call_in_the_history_needs_no_content(fake_server, message):
    server = fake_server(["x"], template=TEXT_TEMPLATE)
    history = [*HI, message, ANSWERED]
    prompt = server.rendered(messages=history)
    assert "None" not in prompt and "null" not in prompt and "lookup" in prompt
    assert server.chat(messages=history).content == "x"


@pytest.mark.parametrize(
    "member",
    ["tool_calls", "function_call", "refusal", "reasoning_content", "audio", "annotations"],
)
def test_null_members_of_a_message_are_as_if_absent(fake_server, member):
    server = fake_server(["x"], template=TEXT_TEMPLATE)
    plain = {"role": "assistant", "content": "Hello."}
    expected = server.rendered(messages=[*HI, plain, user("And?")])
    values = [None, []] if member == "tool_calls" else [None]
    for value in values:
        history = [*HI, plain | {member: value}, user("And?")]
        assert server.rendered(messages=history) == expected
        assert server.chat(messages=history).content == "x"


@pytest.mark.parametrize("script", [["A"], ["hm", "</think>", "A"], ["hm"], []])
def test_a_message_that_this_server_returned_can_be_sent_back(fake_server, script):
    server = fake_server(script, think=True)
    message = server.chat().whole["choices"][0]["message"]
    prompt = server.rendered(messages=[*HI, message, user("And?")])
    assert "None" not in prompt
    assert server.chat(messages=[*HI, message, user("And?")]).finish == "stop"


# ---- Case 35: content as a list of parts ---------------------------------------------------------

AA_BB = [{"type": "text", "text": "AA"}, {"type": "text", "text": "BB"}]
TEMPLATES = {"both": TEXT_TEMPLATE, "parts": PARTS_TEMPLATE, "string": STRING_TEMPLATE, "none": ""}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_are_rendered_in_order_for_every_role(fake_server, role, template):
    server = fake_server(["x"], template=TEMPLATES[template])
    call = [CALLED] if role == "tool" else []
    messages = [user("Hi"), *call, {"role": role, "content": AA_BB, "tool_call_id": "1"}]
    if role == "system":
        messages.reverse()
    messages.append(user("And?"))
    prompt = server.rendered(messages=messages)
    assert 0 < prompt.find("AA") < prompt.find("BB")
    assert "{'type'" not in prompt and '{"type"' not in prompt


@pytest.mark.parametrize("template", TEMPLATES)
def test_string_content_is_rendered_by_every_template(fake_server, template):
    server = fake_server(["x"], template=TEMPLATES[template])
    assert "AABB" in server.rendered(messages=[user("AABB")])


def test_no_parts_are_an_empty_string(fake_server):
    server = fake_server(["x"], template=TEXT_TEMPLATE)
    assert server.rendered(messages=[user([])]) == server.rendered(messages=[user("")])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text"},
        {"type": "weird"},
        {"type": "text", "text": None},
        {"text": "no type"},
        "AA",
        5,
        None,
        {"type": "text", "text": ["AA"]},
    ],
)
def test_a_malformed_part_is_a_400_that_names_its_path(fake_server, part):
    server = fake_server(["x"], template=TEXT_TEMPLATE)
    server.refused(CHAT, {"messages": [user("Hi"), user([part])]}, "messages[1].content[0]")


# ---- Case 36: developer and unknown roles --------------------------------------------------------

PEAR = {"role": "developer", "content": "Reply only: PEAR"}
SYSTEM = {"role": "system", "content": "Be brief."}


def test_a_developer_message_is_rendered_as_system(fake_server):
    server = fake_server(["x"], template=TEXT_TEMPLATE)
    as_system = PEAR | {"role": "system"}
    assert server.rendered(messages=[PEAR, *HI]) == server.rendered(messages=[as_system, *HI])


@pytest.mark.parametrize("first", [[PEAR, SYSTEM], [SYSTEM, PEAR]])
def test_developer_and_system_are_one_system_turn(fake_server, first):
    server = fake_server(["x"], template=TEXT_TEMPLATE)
    prompt = server.rendered(messages=[*first, *HI])
    assert prompt.count("<|im_start|>system") == 1 and "developer" not in prompt
    assert "PEAR" in prompt and "Be brief." in prompt


def test_a_template_that_knows_the_developer_role_gets_it(fake_server):
    template = "{% for m in messages %}{% if m.role == 'developer' %}D:{% endif %}{{ m.content }}"
    server = fake_server(["x"], template=template + "{% endfor %}")
    assert server.rendered(messages=[PEAR, *HI]).startswith("D:Reply only: PEAR")


def test_an_unknown_role_is_a_400(fake_server):
    server = fake_server(["x"], template=TEXT_TEMPLATE)
    server.refused(CHAT, {"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role")


def test_what_the_template_raises_is_a_400_with_its_words(fake_server):
    for source in ("{{ raise_exception('no such turn') }}", "{{ 'no such turn' / 0 }}"):
        error = fake_server(["x"], template=source).refused(CHAT, {"messages": HI})
        assert "no such turn" in error["message"] or "unsupported operand" in error["message"]


# ---- Case 38: mistyped input ---------------------------------------------------------------------

NOT_REQUESTS = ["", "null", "[]", '"x"', "{", "{}", "\x00", "[" * 10, "{'messages': 1}", "\ufeff"]
NOT_MESSAGES = [None, "x", 5, {}, [], [None], ["hi"], [{}], [{"role": 5, "content": "a"}]]
NOT_MESSAGES += [[{"role": "user"}], [{"role": "user", "content": 5}], [{"content": "a"}]]
NOT_MESSAGES += [[{"role": ["user"], "content": "a"}], [{"role": "user", "content": {"a": 1}}]]
NOT_FIELDS = [{"stream": "false"}, {"stream": 1}, {"stop": 5}, {"stop": [5]}, {"n": True}]
NOT_FIELDS += [{"stream_options": 5}, {"stream_options": []}, {"chat_template_kwargs": "x"}]
NOT_FIELDS += [{"temperature": []}, {"seed": "x"}, {"response_format": "json"}, {"tools": {}}]
NOT_FIELDS += [{"reasoning_effort": 5}, {"reasoning_format": "who"}, {"grammar": 5}]
NOT_FIELDS += [{"response_format": {"type": "who"}}, {"logit_bias": "x"}, {"json_schema": 5}]


def test_mistyped_input_is_a_400_and_the_connection_stays_usable(fake_server):
    server = fake_server(["x"])
    bodies = [body.encode() for body in NOT_REQUESTS] + [b"\xff\xfe{}"]
    bodies += [json.dumps({"messages": messages}).encode() for messages in NOT_MESSAGES]
    bodies += [json.dumps({"messages": HI} | fields).encode() for fields in NOT_FIELDS]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.connect()
    sock = connection.sock
    faults = []
    for body in bodies:
        began = time.monotonic()
        connection.request("POST", CHAT, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != 400 or json.loads(data)["error"]["code"] != 400:
            faults.append((body, answer.status, data))
        assert time.monotonic() - began < 5
        assert connection.sock is sock, f"closed after {body!r}"
    connection.close()
    assert not faults
    server.assert_alive()


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/tokenize", "/detokenize"])
def test_other_routes_refuse_what_is_no_object_too(fake_server, path):
    server = fake_server(["x"])
    for body in (b"", b"null", b"[]", b'"x"', b"{", b"5"):
        server.refused(path, body)


@pytest.mark.parametrize("model", [None, "m", "who/knows", "", 5])
def test_the_model_of_a_request_is_ignored_while_one_is_served(fake_server, model):
    server = fake_server(["x"], "--alias", "served")
    assert server.chat(model=model).whole["model"] == "served"


# Anything at all in a field that the server knows, or in a message
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([2**31, 2**63, -(2**64), 10**400])
    | st.floats(allow_nan=False, allow_infinity=False, width=16)
    | st.text("a{%\ud800\0\n", max_size=3)
    | st.sampled_from(["none", "auto", "text", "json_schema", "json_object", "user", "assistant"])
)
keys = st.sampled_from(
    ["type", "text", "role", "content", "schema", "name", "function", "1", "a", ""]
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)
)
KNOWN = (
    "temperature top_p top_k min_p max_tokens n_predict stop seed n n_cmpl stream "
    "stream_options tools tool_choice response_format grammar json_schema logprobs top_logprobs "
    "n_probs logit_bias samplers presence_penalty repeat_penalty repeat_last_n reasoning_effort "
    "chat_template_kwargs ignore_eos reasoning_format timings_per_token return_progress "
    "return_tokens dry_sequence_breakers prompt echo banned_strings response_fields mirostat "
    "typical_p messages parallel_tool_calls post_sampling_probs"
).split()
fields = st.dictionaries(st.sampled_from(KNOWN), values, max_size=3)
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
message = st.dictionaries(st.sampled_from(["tool_calls", "reasoning_content", "name"]), values)
message = st.builds(
    lambda m, role, content: m | {"role": role, "content": content}, message, roles, values
)
AGAIN = [HealthCheck.function_scoped_fixture]


@settings(suppress_health_check=AGAIN)
@given(fields, st.lists(message | st.just(HI[0]), min_size=1, max_size=3))
def test_whatever_a_request_holds_it_is_answered_or_refused(fake_server, fields, messages):
    """Never a 5xx and never a hang; a stream ends as streams do."""
    server = fake_server(["x", "y"], "--max-tokens-cap", 20, template=TEXT_TEMPLATE)
    for path in (CHAT, "/completion", "/v1/completions"):
        body = {"messages": messages, "prompt": "p"} | fields
        status, headers, answer = server.request("POST", path, body)
        assert status in (200, 400), (path, body, answer)
        if status == 200 and headers["content-type"].startswith("text/event-stream"):
            assert b'"error"' not in answer
            assert (
                answer.endswith(b"[DONE]\n\n") or b'"stop":true' in answer or path != "/completion"
            )


# ---- Case 40: templates and names from the client ------------------------------------------------


def test_a_template_in_the_request_is_not_run(fake_server):
    server = fake_server(["x"], think=True)
    prompt = server.rendered()
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    for members in (
        {"chat_template": "{{ ''.__class__.__mro__ }}"},
        {"chat_template_kwargs": {"chat_template": loop}},
        {"chat_template_kwargs": {"messages": [user("other")]}},
        {"chat_template_kwargs": {"tools": [1]}},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
        {"chat_template_kwargs": {"raise_exception": 5, "range": None, "self": 1, "loop": 2}},
        {"chat_template_kwargs": {"": 1, "not a name": 2, "context": 3}},
    ):
        assert server.rendered(**members) == prompt
        assert server.chat(**members).finish == "stop"


def test_the_models_own_template_runs_in_a_sandbox(fake_server):
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        server = fake_server(["x"], template=source + "{{ messages[0].content }}")
        status, answer = server.post(CHAT, {"messages": HI})
        assert status == 400 or "class" not in server.rendered(), answer


# ---- Case 41: null is absent ---------------------------------------------------------------------

NULLABLE = (
    "temperature top_p top_k min_p max_tokens max_completion_tokens n_predict stop seed n stream "
    "stream_options tools tool_choice parallel_tool_calls response_format grammar json_schema "
    "logprobs top_logprobs logit_bias presence_penalty frequency_penalty user metadata store "
    "reasoning_effort chat_template_kwargs service_tier modalities reasoning_format model "
    "timings_per_token return_progress ignore_eos repeat_penalty samplers cache_prompt id_slot"
).split()


def test_null_fields_and_unknown_fields_change_nothing(fake_server):
    server = fake_server(["A", "B"], think=True)
    plain = server.chat()
    assert server.chat(**dict.fromkeys(NULLABLE)).said == plain.said
    assert server.chat(zzz={"a": 1}, NaN="x").said == plain.said
    for name in NULLABLE:
        answer = server.ok(CHAT, {"messages": HI, name: None})
        assert answer["choices"] == plain.whole["choices"], name
        assert answer["usage"] == plain.whole["usage"], name
    answer = server.ok("/completion", {"prompt": "x"} | dict.fromkeys(NULLABLE))
    assert answer["content"] == server.ok("/completion", {"prompt": "x"})["content"]


# ---- Case 42: the limit of tokens ----------------------------------------------------------------


def endless(server, **members):
    return server.chat(ignore_eos=True, **members)


def test_without_a_limit_the_context_is_filled(fake_server):
    server = fake_server(["x"], "-cs", 300, "--max-tokens-cap", 0)
    for members in ({}, {"max_tokens": -1}, {"n_predict": -1}, {"max_tokens": 10**12}):
        reply = endless(server, **members)
        assert reply.finish == "length"
        assert reply.whole["usage"]["total_tokens"] == 300
    server.assert_alive()


def test_the_cap_holds_for_who_asks_for_more_or_nothing(fake_server):
    server = fake_server(["x"], "--max-tokens-cap", 7)
    for members in ({}, {"max_tokens": -1}, {"max_tokens": 9}):
        assert endless(server, **members).said == ("x" * 7, "", "length")


@pytest.mark.parametrize(
    "members",
    [
        {"max_tokens": 3},
        {"max_completion_tokens": 3},
        {"n_predict": 3},
        {"max_completion_tokens": 3, "max_tokens": 9},
        {"n_predict": 3, "max_completion_tokens": 9, "max_tokens": 9},
        {"max_tokens": 3.0},
    ],
)
def test_three_tokens_are_three_tokens_and_the_newer_name_wins(fake_server, members):
    """n_predict, then max_completion_tokens, then max_tokens."""
    reply = endless(fake_server(["x"]), **members)
    assert reply.said == ("xxx", "", "length")
    assert reply.whole["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_a_limit_of_0_generates_nothing(fake_server, name):
    reply = endless(fake_server(["x"]), **{name: 0})
    assert reply.said == ("", "", "length")
    assert reply.whole["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("value", [-2, 2.5, "3", True, [3], {}])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_a_limit_that_is_none_is_a_400(fake_server, name, value):
    fake_server(["x"]).refused(CHAT, {"messages": HI, name: value}, name)


# ---- Case 43: the context's size -----------------------------------------------------------------


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(fake_server):
    server = fake_server(["x"], "-cs", 256)
    for n in (256, 257, 2000):  # the fake's tokens are bytes
        error = server.refused("/completion", {"prompt": "a" * n}, "context size")
        assert error["type"] == "exceed_context_size_error"
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (n, 256)
        assert str(n) in error["message"] and "256" in error["message"]
        assert "exceeds the available context size" in error["message"]
    error = server.refused(CHAT, {"messages": [user("a" * 300)]})
    assert error["type"] == "exceed_context_size_error" and error["n_ctx"] == 256
    server.assert_alive()


def test_a_prompt_that_nearly_fills_the_context_gets_what_fits(fake_server):
    server = fake_server(["x"], "-cs", 256)
    for n, wanted in ((255, -1), (246, 1000), (246, -1)):
        result = server.completion(prompt="a" * n, n_predict=wanted, ignore_eos=True)
        assert result["content"] == "x" * (256 - n) and result["stop_type"] == "limit"


# ---- Case 45: numbers ----------------------------------------------------------------------------

NUMBERS = "temperature top_p min_p presence_penalty frequency_penalty repeat_penalty".split()


@pytest.mark.parametrize("name", [*NUMBERS, "top_k", "seed", "max_tokens"])
@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_a_number_that_is_not_finite_is_a_400(fake_server, name, text):
    fake_server(["x"]).refused(CHAT, b'{"messages":%b,"%b":%b}' % bits(name, text))


def bits(name, text):
    return json.dumps(HI).encode(), name.encode(), text.encode()


@pytest.mark.parametrize("text", ["NaN", "1e999", '"x"', "[]"])
def test_a_bias_that_is_no_finite_number_is_a_400(fake_server, text):
    body = b'{"messages":%b,"logit_bias":{"1":%b}}' % (json.dumps(HI).encode(), text.encode())
    fake_server(["x"]).refused(CHAT, body)


@pytest.mark.parametrize("fields", [{"temperature": -1}, {"top_p": -0.1}, {"top_p": 1.5}])
def test_a_number_out_of_range_is_a_400_that_names_it(fake_server, fields):
    fake_server(["x"]).refused(CHAT, {"messages": HI} | fields, next(iter(fields)))


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0}, {"temperature": 1e-7}, {"top_p": 0}, {"top_k": 0}, {"top_k": -1}]
    + [{"min_p": 0}, {"min_p": 1}, {"temperature": 100}, {"presence_penalty": -2}],
)
def test_extreme_but_meaningful_numbers_are_legal(fake_server, fields):
    assert fake_server(["x"]).chat(**fields).content == "x"


# ---- Case 46: token ids outside the vocabulary ---------------------------------------------------


def test_ids_outside_the_vocabulary_are_refused_and_harm_nobody(fake_server):
    server = fake_server(["x"], delay=0.01)
    result = []
    body = {"messages": HI, "ignore_eos": True, "max_tokens": 60}
    other = threading.Thread(target=lambda: result.append(server.ok(CHAT, body)))
    other.start()
    biases = [
        {"99999999": 5},
        {"-1": 5},
        {"9" * 5000: 5},
        [[99999999, False]],
        [[-1, 1]],
        [[1.5, 1]],
    ]
    for bias in biases + [[[True, 1]], [["a"]], [5], {str(2**70): 1}]:
        server.refused(CHAT, {"messages": HI, "logit_bias": bias}, "logit_bias")
    for prompt in ([1, 99999999], [-5], [2**70], [1.5], [True], ["a", -1], [[1], [-1]]):
        server.refused("/completion", {"prompt": prompt}, "prompt")
    for tokens in ([99999999], [-1], [1.5], ["a"], [None], [[1]]):
        server.refused("/detokenize", {"tokens": tokens}, "tokens")
    other.join(20)
    assert result[0]["choices"][0]["message"]["content"] == "x" * 60
    assert server.chat().content == "x"


def test_ids_inside_the_vocabulary_are_taken_in_every_spelling(fake_server):
    server = fake_server(["x"])
    for bias in ({"5": 1}, {"5": -100}, [[5, 1.5]], [["a", -1]], [[5, False]], {}, []):
        assert server.chat(logit_bias=bias).content == "x"


# ---- Case 49: several choices --------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 3])
def test_every_choice_has_its_own_role_deltas_and_finish(fake_server, slots):
    server = fake_server(["a", "b"], "--parallel", slots)
    replies = server.chats(n=3, stream_options={"include_usage": True})
    assert [reply.said for reply in replies] == [("ab", "", "stop")] * 3
    one = server.chat().whole["usage"]
    usage = replies[0].whole["usage"]
    assert usage["completion_tokens"] == 3 * one["completion_tokens"]
    assert usage["prompt_tokens"] == one["prompt_tokens"]
    assert replies[0].usage == usage


@pytest.mark.parametrize("n", [0, -1, "2", 100000, 1.5, True, []])
def test_an_impossible_number_of_choices_is_a_400_that_names_n(fake_server, n):
    fake_server(["x"]).refused(CHAT, {"messages": HI, "n": n}, "'n'")


def test_leaving_cancels_every_choice(fake_server):
    server = fake_server(["x"], "--parallel", 3, delay=0.01)
    with server.open_stream({"n": 5, "ignore_eos": True}) as (reader, _, _):
        reader.chunk()
        server.wait_busy(3)
    server.wait_idle()
    server.assert_alive()


# ---- Case 50: prompts of the completion routes ---------------------------------------------------

PROMPTS = {
    "text": ("a", 1),
    "texts": (["a", "b"], 2),
    "tokens": ([1, 2, 3], 1),
    "lists-of-tokens": ([[1, 2], [3]], 2),
    "mixed": (["a", 5, "b"], 1),
    "text-and-tokens": (["a", [1, 2]], 2),
    "empty": ("", 1),
    "one-text-in-a-list": (["a"], 1),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_every_form_of_prompt_is_answered_in_order(fake_server, name):
    server = fake_server(["x", "y"])
    prompt, n = PROMPTS[name]
    answer = server.ok("/v1/completions", {"prompt": prompt})
    rows = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert rows == [(i, "xy") for i in range(n)]
    results = server.ok("/completion", {"prompt": prompt})
    results = results if isinstance(results, list) else [results]
    assert [(r["index"], r["content"]) for r in results] == [(i, "xy") for i in range(n)]
    texts = dict.fromkeys(range(n), "")
    for event in map(json.loads, server.stream("/v1/completions", {"prompt": prompt})[:-1]):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == dict.fromkeys(range(n), "xy")
    server.assert_alive()


def test_a_mixed_list_is_one_prompt_of_its_tokens(fake_server):
    result = fake_server(["x"]).completion(prompt=["a", 5, "bc"])
    assert result["tokens_evaluated"] == 4


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
@pytest.mark.parametrize("prompt", [[], [[]], None, {}, 5, True, [None], [["a", []]], "missing"])
def test_no_prompt_is_a_400(fake_server, path, prompt):
    server = fake_server(["x"])
    server.refused(path, {} if prompt == "missing" else {"prompt": prompt}, "prompt")
    server.assert_alive()


# ---- Case 53: deep nesting -----------------------------------------------------------------------


def nested(depth, inner='{"type":"string"}'):
    for _ in range(depth):
        inner = '{"type":"array","items":' + inner + "}"
    return inner


AND_HI = '{"messages":[{"role":"user","content":"x"}],'
DEEP = {
    "arrays": '{"messages":[],"zzz":' + "[" * 20000 + "]" * 20000 + "}",
    "open-objects": '{"a":' * 20000,
    "objects": '{"a":' * 20000 + "1" + "}" * 20000,
    "response_format": AND_HI
    + '"response_format":{"type":"json_schema","json_schema":{"schema":'
    + nested(500)
    + "}}}",
    "json_schema": AND_HI + '"json_schema":' + nested(500) + "}",
    "kwargs": AND_HI + '"chat_template_kwargs":{"a":' + "[" * 20000 + "]" * 20000 + "}}",
}


@pytest.mark.parametrize("name", DEEP)
def test_deep_nesting_is_a_400_and_harms_nobody(fake_server, name):
    server = fake_server(["x"], delay=0.01)
    body = {"messages": HI, "ignore_eos": True, "max_tokens": 30}

    def refused():
        began = time.monotonic()
        server.refused(CHAT, DEEP[name].encode())
        assert time.monotonic() - began < 5

    _, answer = in_threads(refused, lambda: server.ok(CHAT, body))
    assert answer["choices"][0]["message"]["content"] == "x" * 30
    server.assert_alive()


def test_a_deep_value_that_the_template_prints_is_no_500(fake_server):
    """900 levels pass the JSON parser; `tojson` may not be able to print them."""
    server = fake_server(["x"], template=THINK_TEMPLATE + "{{ a | tojson }}")
    value = json.loads("[" * 900 + "]" * 900)
    status, _ = server.post(CHAT, {"messages": HI, "chat_template_kwargs": {"a": value}})
    assert status in (200, 400)
    with server.connect() as sock:
        sock.sendall(http_request("/health"))
        assert sock.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": ["a"] * 100_000}),
        ("/completion", {"prompt": ["a"] * 100_000 + [5]}),
        ("/completion", {"prompt": "a", "json_schema": {"title": "x" * 2_000_000}}),
        ("/tokenize", {"content": "a" * 300_000, "with_pieces": True}),
        ("/tokenize", {"content": "a" * 9_000_000}),
        ("/tokenize", {"content": ["a"] * 100_000}),
    ],
    ids=["prompts", "texts-of-a-prompt", "schema", "pieces", "text", "texts"],
)
def test_what_would_cost_minutes_or_gigabytes_is_refused_before_the_work(fake_server, path, body):
    server = fake_server()
    status, answer = server.post(path, body)
    field = [*body][-1] if path == "/completion" else "content"
    message = answer["error"]["message"]
    assert status == 400 and " is outside " in message and f"'{field}" in message
    server.assert_alive()


def test_thousands_of_developer_messages_are_joined_in_no_time(fake_server):
    """They were joined one by one, each time with a copy of all before: 22 s for these."""
    server = fake_server(["x"])
    messages = [{"role": "system", "content": "S"}]
    messages += [{"role": "developer", "content": f"{i} " + "d" * 2000} for i in range(5000)]
    prompt = server.ok("/apply-template", {"messages": messages})["prompt"]
    assert prompt.startswith("<|im_start|>system\nS\n\n0 ddd") and "\n\n4999 ddd" in prompt
    assert prompt.count("<|im_start|>system") == 1


def test_what_a_running_request_needs_no_more_is_not_kept():
    fields = {"stream": True, "messages": [1], "tools": [1], "junk": "x" * 100, "stop": ["a"]}
    info = SimpleNamespace(n_ctx=10, n_vocab=5)
    args = SimpleNamespace(max_tokens_cap=0, seed=-1)
    model = SimpleNamespace(info=info, args=args, defaults={"samplers": []})
    task = serve.Task(None, model, fields, [("p", [1])])
    assert task.fields == {"stream": True, "stop": ["a"]}


@pytest.mark.parametrize("name", ["content", "tool_calls"])
def test_parts_and_calls_are_bounded_over_all_messages(fake_server, name):
    """A million calls took a worker ten seconds."""
    item = {"type": "text", "text": "", "function": {}}
    messages = [{"role": "assistant", name: [item] * 5000}, {"role": "user", "content": "x"}]
    server = fake_server(["x"])
    server.ok("/apply-template", {"messages": messages * 2})
    server.refused("/apply-template", {"messages": messages * 3}, "parts and calls")
