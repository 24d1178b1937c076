"""Chat templates render as transformers' `apply_chat_template` renders them, byte for byte.

The templates here are written for these tests, each for one feature; the real ones are tried by
hand. Templates are the model maker's code: what tries to leave the sandbox is refused with a 400.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import shutil
import sys

import jinja2
import pytest
import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import engine as eng
import exl3_serve as serve
from exl3_serve import ApiError


@pytest.fixture(scope="module")
def tokenizer():
    """transformers' tokenizer of the tiny model: it has bos, eos and pad tokens."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(tiny_model.cached("fp16")))


def model_in(directory, *flags):
    """The surface's model over a directory, with the fake engine behind it."""
    args = serve.make_parser().parse_args(["--fake", *map(str, flags)])
    fake = argparse.Namespace(fake_delay=0.0, fake_script=None, cache_size=4096)
    return serve.Model(eng.FakeBackend(fake, str(directory)), args)


@pytest.fixture(scope="module")
def tiny():
    return model_in(tiny_model.cached("fp16"))


def with_template(model, text):
    """The same model with another template."""
    model = copy.copy(model)
    model.template_text, model.template = text, serve.compile_template(text)
    model.tools_template = model.template
    return model


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text} | more


def tool(name, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    about = {"name": name, "description": 'Looks <up> "é" & more', "parameters": schema}
    return {"type": "function", "function": about}


TOOLS = [tool("lookup", q={"type": "string"}, k={"type": "integer"}), tool("ping_box")]
ARGUMENTS = {"q": 'x "y" <é> \u2028', "k": 3, "o": {"b": [1.5, None, True]}}
CALL = {"id": "call_0", "type": "function", "function": {"name": "lookup", "arguments": ARGUMENTS}}
THOUGHT = "one\nplus one"
CONVERSATIONS = {
    "plain": [user("Say hi.")],
    "turns": [user("Hi"), assistant("Hello  \n"), user(" and {{ again }} {% x %}\n\n")],
    "system": [system(" Be <kind>. "), user("東京 🦜 é \u2028")],
    "calls": [
        user("weather?"),
        assistant("", tool_calls=[CALL, CALL]),
        {"role": "tool", "tool_call_id": "call_0", "name": "lookup", "content": "sunny"},
    ],
    "thought": [
        user("1+1"),
        {"thinking": THOUGHT} | assistant("2", reasoning_content=THOUGHT),
        user("2+2"),
    ],
}

TEMPLATES = {
    "trim and lstrip blocks": (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n  [{{ m.content }}]\n"
        "    {% endif %}\n\t{# a comment #}\n  x {% set y = 1 %}  \n\n{{ y }}\n\n"
        "{% endfor %}\n  end  \n"
    ),
    "white space control": (
        "  {%- for m in messages -%}  \n {{- m.role -}} \n : {{ m.content }} \n{%+ if true %}\n a"
        "{% endif +%}\n{% endfor -%}\n\n  {%- if add_generation_prompt %} go {% endif %}"
    ),
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ loop.index0 }}{{ m.content }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}\n<a>{%- generation -%}\n"
        "{{ m.content }}\n{% set inner = 5 %}{% endgeneration %}</a>\n"
        "{% generation %}  \n x{{ loop.index }}\n"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "tojson": (
        "{{ messages | tojson }}\n{{ tools | tojson }}{{ tools | tojson(indent=2) }}"
        "{{ messages | tojson(ensure_ascii=true) }}{{ '<é>&\\'' | tojson }}"
        "{{ messages | tojson(separators=(',', ':')) }}{{ messages | tojson(sort_keys=true) }}"
        "{{ messages | tojson(indent=4, sort_keys=true, separators=(',', ' : ')) }}"
        "{{ 1.5 | tojson }}"
    ),
    "special tokens": (
        "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
        "{{ pad_token }}[{{ unk_token }}]{% if cls_token is defined %}cls{% endif %}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0, seen=[]) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% set ns.seen = ns.seen + [m.role] %}{% endfor %}{{ ns.n }}{{ ns.seen | join(',') }}"
        "{{ dict(a=1, b=2) }}{{ dict.fromkeys(['x'], 1) }}"
    ),
    "tools": (
        "{% if tools %}{% for t in tools %}{{ loop.index }}:{{ t.function.name }}("
        "{% for k, v in t.function.parameters.properties.items() %}{{ k }}={{ v.type }}"
        "{{ ', ' if not loop.last }}{% endfor %}){{ t.function.description }}\n{% endfor %}"
        "{% elif tools is none %}no tools{% endif %}{% for m in messages %}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments }}"
        "{{ c.function.arguments | tojson }}{{ c.function.arguments | items | list }}{% endfor %}"
        "{% endfor %}"
    ),
    "macros, filters, tests, slices and methods": (
        "{%- macro show(m, mark='*') %}{{ mark }}{{ m.role | upper }}{{ caller() if caller }}"
        "{%- endmacro %}{% for m in messages[::-1] %}{{ show(m) }}{{ m.content | trim | length }}"
        "{{ m.content.split(' ')[-1] }}{{ m.content.startswith('S') }}{{ m['content'][:3] }}"
        "{{ m.reasoning_content | default('none') }}{{ m is mapping }}{{ m.content is string }}"
        "{{ m.content.strip().replace('i', 'I') }}{% endfor %}{{ messages | map(attribute='role')"
        " | unique | join('-') }}{{ messages | selectattr('role', 'equalto', 'user') | list"
        " | length }}{{ '%s-%05d' % ('a', 7) }}{{ '{}:{}'.format(1, 2) }}{{ 7 // 2 ~ 'x' }}"
        "{{ not false }}"
    ),
    "undefined and none": (
        "{{ nothing }}[{{ messages[0].nothing }}]{{ none }}{{ documents }}{{ documents is none }}"
        "{{ 'y' if nothing else 'n' }}{{ messages[0].get('nothing', 'd') }}"
    ),
    "a date": "{{ strftime_now('%Y %d %B') }}{{ strftime_now is defined }}",
    "a variable of the caller": (
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
        "{{ level | default('unset') }}{{ bos_token }}"
    ),
}


def both(tokenizer, model, template, messages, tools=None, **kwargs):
    """What transformers renders, and what we do."""
    theirs = tokenizer.apply_chat_template(
        copy.deepcopy(messages),
        tools=copy.deepcopy(tools),
        chat_template=template,
        add_generation_prompt=True,
        tokenize=False,
        **kwargs,
    )
    return theirs, with_template(model, template).render(messages, tools, kwargs)


# ==== As transformers renders =====================================================================


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_every_feature_renders_as_in_transformers(tokenizer, tiny, name, conversation, tools):
    messages = CONVERSATIONS[conversation]
    theirs, ours = both(tokenizer, tiny, TEMPLATES[name], messages, tools)
    assert ours == theirs


@pytest.mark.parametrize(
    "kwargs",
    [{"enable_thinking": False}, {"level": "<é>"}, {"level": [1, {"a": None}]}, {"bos_token": "B"}],
    ids=str,
)
def test_variables_of_the_caller_reach_the_template(tokenizer, tiny, kwargs):
    template = TEMPLATES["a variable of the caller"]
    theirs, ours = both(tokenizer, tiny, template, CONVERSATIONS["plain"], **kwargs)
    assert ours == theirs


SNIPPETS = [
    "{% for m in messages %}A\n  {{ m.content }}\n{% endfor %}\n",
    "{%- for m in messages %}\n{{- m.content -}}\n{%- endfor %}",
    "  {% if tools %}\n{{ tools | tojson(indent=1) }}\n  {% endif %}\n",
    "\n  {# c #}\n",
    "{#- c -#}",
    "{% set x = messages | length %}\n{{ x }}",
    "{{ messages | tojson }}",
    "{% generation %}\n g \n{% endgeneration %}\n",
    "{% raw %}{{ raw }}\n{% endraw %}\n",
    " \n\t",
    "{% if add_generation_prompt %}{{ eos_token }}\n{% endif %}",
    "é<>&\u2028{{ '\\n' }}",
]
messages_of_any_text = st.lists(
    st.builds(
        lambda role, text: {"role": role, "content": text},
        st.sampled_from(["system", "user", "assistant"]),
        st.text(st.sampled_from('a \n\té東<>&"{}%#\\\u2028\x00'), max_size=8),
    ),
    min_size=1,
    max_size=3,
)


def test_any_mixture_of_snippets_and_texts_renders_as_in_transformers(tokenizer, tiny):
    @settings(deadline=None, max_examples=80)
    @given(
        snippets=st.lists(st.sampled_from(SNIPPETS), min_size=1, max_size=5),
        messages=messages_of_any_text,
        tools=st.sampled_from([None, TOOLS]),
    )
    def check(snippets, messages, tools):
        theirs, ours = both(tokenizer, tiny, "".join(snippets), messages, tools)
        assert ours == theirs

    check()


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_of_the_history_reaches_templates_under_both_names(tokenizer, tiny, name):
    """gpt-oss templates read `thinking`, the others `reasoning_content`; clients send either."""
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }};{% endfor %}"
    messages = [user("1+1"), assistant("2", **{name: THOUGHT}), user("2+2")]
    theirs, _ = both(tokenizer, tiny, template, messages)
    fields = serve.checked({"messages": messages})
    assert serve.render_chat(with_template(tiny, template), fields)[0] == theirs


def test_rendering_leaves_the_messages_as_they_were(tiny):
    messages = copy.deepcopy(CONVERSATIONS["calls"])
    with_template(tiny, TEMPLATES["tools"]).render(messages, TOOLS, {})
    assert messages == CONVERSATIONS["calls"]


# ==== Where the template and its tokens come from =================================================

CONFIG_ONLY = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}


def directory_with(tmp_path, config=None, jinja=None, special=None):
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    if special is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(special), "utf-8")
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_text(jinja, "utf-8")
    return tmp_path


NAMED = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D é"}]


@pytest.mark.parametrize(
    ("config", "jinja", "override", "expected"),
    [
        ({"chat_template": "C é"}, None, None, "C é"),
        ({"chat_template": NAMED}, None, None, "D é"),
        ({"chat_template": NAMED[:1]}, None, None, "T"),
        ({"chat_template": "C"}, "J é\n", None, "J é\n"),
        ({"chat_template": "C"}, "J", "O é", "O é"),
        (None, "J", None, "J"),
        (None, None, "O", "O"),
    ],
)
def test_the_template_is_the_nearest_one(tmp_path, config, jinja, override, expected):
    """--chat-template-file, else chat_template.jinja, else tokenizer_config.json."""
    flags = []
    if override is not None:
        (tmp_path / "override.txt").write_text(override, "utf-8")
        flags = ["--chat-template-file", tmp_path / "override.txt"]
    model = model_in(directory_with(tmp_path, config, jinja), *flags)
    assert model.template_text == expected
    assert model.render([user("x")], None, {}) == expected.removesuffix("\n")


@pytest.mark.parametrize("config", [None, {}, {"chat_template": None}, {"chat_template": []}])
def test_a_model_without_a_template_gets_chatml_which_shows_tools_as_json(tmp_path, config):
    model = model_in(directory_with(tmp_path, config))
    expected = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert model.render([user("x")], None, {}) == expected
    assert model.template_text == ""
    shown = model.render([user("x")], TOOLS, {})
    assert shown.endswith(expected) and json.dumps(TOOLS, ensure_ascii=False) in shown


def test_a_template_named_for_tools_is_taken_with_tools_alone(tmp_path):
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    model = model_in(directory_with(tmp_path, {"chat_template": named}))
    assert model.render([user("x")], None, {}) == model.render([user("x")], [], {}) == "D"
    assert model.render([user("x")], TOOLS, {}) == "T"


# ==== Calls in the history ========================================================================

AS_JSON = "{{ call.function.arguments | tojson }}"
AS_TEXT = "{{ '' + call.function.arguments }}"
AS_PYTHON = "{{ call.function.arguments }}"
AS_ITEMS = "{% for k, v in call.function.arguments | items %}<{{ k }}>{{ v }}{% endfor %}"
EITHER = "{% if call.function.arguments is string %}" + AS_PYTHON + "{% else %}" + AS_JSON
EITHER += "{% endif %}"
OSLO = {"q": "Oslo é", "k": 2}


def history_shown(tmp_path, form, arguments):
    """What a template with this form shows of a call with these arguments."""
    template = "{% for m in messages %}{% for call in m.tool_calls %}" + form
    template += "{% endfor %}{% endfor %}"
    model = model_in(directory_with(tmp_path, jinja=template))
    function = {"name": "lookup"} | ({} if arguments is ... else {"arguments": arguments})
    call = {"id": "c1", "type": "function", "function": function}
    messages = [user("x"), {"role": "assistant", "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "c1", "content": "ok"})
    before = copy.deepcopy(messages)
    text, _ = serve.render_chat(model, serve.checked({"messages": messages}))
    assert messages == before
    return text


@pytest.mark.parametrize("form", [AS_JSON, AS_TEXT, AS_PYTHON, AS_ITEMS, EITHER])
def test_case_24_arguments_in_history_are_what_the_template_wants(tmp_path, form):
    written = json.dumps(OSLO, ensure_ascii=False)
    shown = history_shown(tmp_path, form, OSLO)
    assert shown == history_shown(tmp_path, form, written)
    assert shown == history_shown(tmp_path, form, json.dumps(OSLO, indent=1))
    assert shown == ("<q>Oslo é<k>2" if form == AS_ITEMS else written)
    for broken in ("not json", "[1,2]", "{" * 5000, "5"):
        assert broken in history_shown(tmp_path, form, broken)


@pytest.mark.parametrize("form", [AS_JSON, AS_TEXT, AS_ITEMS])
def test_case_25_empty_arguments_in_history_are_an_empty_object(tmp_path, form):
    expected = "" if form == AS_ITEMS else "{}"
    for nothing in ("", "{}", "null", None, ..., {}):
        assert history_shown(tmp_path, form, nothing) == expected


@pytest.mark.parametrize(
    ("calls", "path"),
    [
        ("x", "messages[0].tool_calls"),
        ([5], "messages[0].tool_calls[0]"),
        ([{}], "messages[0].tool_calls[0].function"),
        ([{"function": {}}, {"function": 5}], "messages[0].tool_calls[1].function"),
    ],
)
def test_calls_that_are_none_are_a_400_with_their_place(tiny, calls, path):
    messages = [{"role": "assistant", "tool_calls": calls}, user("x")]
    with pytest.raises(ApiError, match=re.escape(f"'{path}'")) as caught:
        serve.render_chat(tiny, serve.checked({"messages": messages}))
    assert caught.value.status == 400


def test_a_message_is_continued_also_when_the_web_ui_of_llama_server_asks_for_it(tiny):
    body = {"messages": [user("x"), assistant("Sure, ")]}
    plain = serve.render_chat(tiny, serve.checked(body))
    asked = body | {"continue_final_message": True, "add_generation_prompt": False}
    assert serve.render_chat(tiny, serve.checked(asked)) == plain
    assert plain[0].endswith("Sure, ")


@pytest.mark.parametrize(
    ("config", "special", "expected"),
    [
        ({"bos_token": "<s>"}, None, {"bos_token": "<s>"}),
        (CONFIG_ONLY, None, {"bos_token": "<s>", "eos_token": "</s>"}),
        ({"bos_token": None}, None, {}),
        (None, {"bos_token": {"content": "<s>"}}, {"bos_token": "<s>"}),
        (
            {"eos_token": "E"},
            {"eos_token": "e", "pad_token": "p"},
            {"eos_token": "E", "pad_token": "p"},
        ),
        ({"add_bos_token": True, "mask_token": "m"}, None, {"mask_token": "m"}),
    ],
)
def test_special_tokens_come_from_the_files_of_the_model(tmp_path, config, special, expected):
    model = model_in(directory_with(tmp_path, config, "x", special))
    assert model.specials == expected


def test_special_tokens_are_those_that_transformers_finds(tokenizer, tiny):
    known = {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
    assert tiny.specials == known


def test_the_template_in_the_directory_is_found_as_transformers_finds_it(tokenizer, tiny, tmp_path):
    """The tiny model's own template, wherever it is written."""
    messages = CONVERSATIONS["calls"]
    theirs = tokenizer.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    assert tiny.render(messages, TOOLS, {}) == theirs
    moved = shutil.copytree(tiny_model.cached("fp16"), tmp_path / "moved")
    config = json.loads((moved / "tokenizer_config.json").read_text("utf-8"))
    (moved / "chat_template.jinja").unlink(missing_ok=True)
    directory_with(moved, config | {"chat_template": tiny.template_text})
    assert model_in(moved).render(messages, TOOLS, {}) == theirs


def test_a_template_that_does_not_compile_is_told_at_load(tmp_path):
    with pytest.raises(eng.LoadError, match="chat template of the model: "):
        model_in(directory_with(tmp_path, None, "{% if %}"))


# ==== Refusals ====================================================================================


def refused(model, template, messages=None, **kwargs):
    """The message of the 400 that rendering ends in."""
    with pytest.raises(ApiError) as caught:
        with_template(model, template).render(messages or [user("x")], None, kwargs)
    assert caught.value.status == 400
    return caught.value.message


def test_a_templates_own_complaint_is_a_400_with_its_message(tiny):
    assert "roles must <alternate>" in refused(
        tiny, "{{ raise_exception('roles must <alternate>') }}"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ messages[0].nothing.more }}",
        "{{ messages[5].role.x }}",
        "{{ nothing() }}",
        "{{ 'a' + 1 }}",
        "{{ [1] | tojson(cls=1) }}",
        "{{ messages | no_such_filter }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ '%d' % 'x' }}",
        "{% for a, b in messages %}{% endfor %}{{ {}.x.y }}",
    ],
)
def test_whatever_a_template_raises_is_a_400(tiny, template):
    try:
        assert refused(tiny, template)
    except jinja2.TemplateAssertionError:  # an unknown filter is found at load
        assert "no_such_filter" in template


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ strftime_now.__globals__.os }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ namespace.__init__.__globals__.os }}",
        "{{ self.__init__.__globals__.os }}",
        "{{ dict.__base__.__subclasses__() }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ '{x.__class__.__mro__}'.format_map({'x': 1}) }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ range(100000000) | length }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.name }}",
        "{% extends 'base' %}",
        "{% from 'os' import system %}",
    ],
)
def test_a_way_out_of_the_sandbox_is_a_400(tiny, template):
    messages = [user("x")]
    refused(tiny, template, messages)
    assert messages == [user("x")]


def test_a_template_may_keep_a_list_of_its_own_and_does_not_change_what_the_client_sent(tiny):
    messages = [user("x")]
    template = "{% set q = namespace(ids=[]) %}{% set _ = q.ids.append(5) %}{{ q.ids.pop(0) }}"
    assert with_template(tiny, template).render(messages, None, {}) == "5"
    with_template(tiny, "{{ messages.append(1) }}").render(messages, None, {})
    assert messages == [user("x")]


@pytest.mark.parametrize(
    "kwargs",
    [{"messages": [user("evil")]}, {"tools": [1]}, {"add_generation_prompt": False}],
    ids=str,
)
def test_a_request_cannot_replace_what_the_server_gives_the_template(tiny, kwargs):
    template = "{{ messages[0].content }}{{ tools }}{{ add_generation_prompt }}"
    assert with_template(tiny, template).render([user("x")], None, kwargs) == "xNoneTrue"


@pytest.mark.parametrize(
    "name",
    ["self", "loop", "range", "", "a b", "__class__", "context", "é", "raise_exception", "cls"],
)
def test_any_name_of_a_variable_is_harmless(tiny, name):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ range(2) | length }}"
    fields = {"messages": [user("x")], "chat_template_kwargs": {name: {"a": [None]}}}
    try:
        prompt, _ = serve.render_chat(with_template(tiny, template), serve.checked(fields))
        assert prompt == "x2"
    except ApiError as error:  # a template that needs `range` cannot do without
        assert error.status == 400 and name == "range"


def test_messages_nested_too_deeply_for_the_template_are_a_400(tiny):
    deep = {}
    for _ in range(100_000):
        deep = {"a": deep}
    refused(tiny, "{{ messages | tojson }}", [user("x") | {"more": deep}])
    refused(tiny, "{{ messages | string }}", [user("x") | {"more": deep}])
    while deep:  # Python would take the nest down recursively
        deep = deep.pop("a")


# ==== Code to fill in =============================================================================

QWEN = {name: 1000 + i for i, name in enumerate(["<|fim_prefix|>", "<|fim_suffix|>"])}
QWEN |= {"<|fim_middle|>": 1002, "<|repo_name|>": 1003, "<|file_sep|>": 1004}


def infill(model, marks, **body):
    """The prompt that /infill makes, its marks as text."""
    model = copy.copy(model)
    model.backend = copy.copy(model.backend)
    model.backend.single_id = marks.get
    body = {"input_prefix": "def f(", "input_suffix": "return"} | body
    ((_, ids),) = serve.prepare_infill(serve.LlamaDialect, model, body).prompts
    names = {i: name for name, i in marks.items()}
    return "".join(names[i] if i in names else chr(i) for i in ids)


def test_code_to_fill_in_is_marked_as_the_models_family_does_it(tiny):
    """As llama-server's format_prompt_infill, whose order is that of Qwen2.5-Coder's paper."""
    files = [{"filename": "a.py", "text": "x = 1\n"}, {"text": "y"}]
    assert infill(tiny, QWEN, input_extra=files, prompt="a, ") == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\nx = 1\n<|file_sep|>tmp\ny"
        "<|file_sep|>filename\n<|fim_prefix|>def f(a, <|fim_suffix|>return<|fim_middle|>"
    )
    assert infill(tiny, {"<PRE>": 1001, "<SUF>": 1002, "<MID>": 1003}, input_extra=files) == (
        "\n\n--- snippet ---\n\nx = 1\n\n\n--- snippet ---\n\ny<PRE>def f(<SUF>return<MID>"
    )
    deepseek = {"<｜fim▁begin｜>": 1001, "<｜fim▁hole｜>": 1002, "<｜fim▁end｜>": 1003}
    assert infill(tiny, deepseek) == "<｜fim▁begin｜>def f(<｜fim▁hole｜>return<｜fim▁end｜>"
    with pytest.raises(ApiError, match="infill"):
        infill(tiny, {"<PRE>": 1001, "<SUF>": 1002})
