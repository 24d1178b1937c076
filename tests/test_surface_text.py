"""Stop strings and thoughts: cases 13, 14, 16, 19, 20 and 22 of the project's list of faults.

Every answer is asked for with and without stream, by `Server.chat` and `Server.completion`.
"""

from __future__ import annotations

import json

import pytest
import tiny_model
from server_process import HI

LENGTH = {"end": "length"}

# ---- Case 13: stop strings over several tokens ---------------------------------------------------

STOPS = {
    "over-tokens": (["three four"], ["one two ", "thr", "ee fo", "ur five", " six"], "one two "),
    "held-back-tail": (["###END"], ["a ", "##", " b", "#"], "a ## b#"),
    "inside-a-token": (["\n"], ["x", "?\ny"], "x?"),
    "text-after-it": (["STOP"], ["k STOP tail"], "k "),
    "at-the-start": (["STOP"], ["STOP", "x"], ""),
    "in-the-last-piece": (["END"], ["a", "EN", "D"], "a"),
    "split-over-bytes": (["é!"], ["a", b"\xc3", b"\xa9", "!", "b"], "a"),
}


@pytest.mark.parametrize("name", STOPS)
def test_text_is_cut_at_the_stop_string(fake_server, name):
    stop, script, content = STOPS[name]
    server = fake_server(script)
    reply = server.chat(stop=stop)
    assert reply.said == (content, "", "stop")
    result = server.completion(prompt="Hi", stop=stop)
    assert result["content"] == content
    found = name != "held-back-tail"
    assert result["stop_type"] == ("word" if found else "eos")
    assert result["stopping_word"] == (stop[0] if found else "")


def test_a_stop_string_may_be_a_string_and_empty_ones_are_none(fake_server):
    server = fake_server(["a", "b", "c"])
    assert server.chat(stop="b").content == "a"
    for nothing in ("", [], [""], None, [None]):
        assert server.chat(stop=nothing).content == "abc"


def test_text_held_for_a_stop_string_is_not_lost_at_the_limit(fake_server):
    server = fake_server(["a", "##", "b"])
    assert server.chat(stop=["###"], max_tokens=2).said == ("a##", "", "length")


def test_a_stop_string_completed_by_the_last_allowed_token_is_still_found(fake_server):
    server = fake_server(["Hello", "ST", "OP", "x"])
    assert server.chat(stop=["STOP"], max_tokens=3).said == ("Hello", "", "stop")


def test_generation_ends_with_the_stop_string(fake_server):
    """At most two more steps are counted, of a text that goes on for ever."""
    server = fake_server(["a", "b", "STOP", "c"])
    reply = server.chat(stop=["STOP"], ignore_eos=True)
    assert 3 <= reply.whole["usage"]["completion_tokens"] <= 5
    server.wait_idle()


def test_only_what_may_become_the_stop_string_is_held_back(fake_server):
    """Everything before `##` came in deltas of its own, and `##` when `x` followed."""
    server = fake_server(["a ", "b", "##", "x", "##"])
    reply = server.chat(stop=["###"])
    assert [text for _, text in reply.deltas] == ["a ", "b", "##", "x", "##"]


# ---- Case 14: stop strings and thoughts ----------------------------------------------------------


def test_a_stop_string_in_the_thought_does_not_stop_it(fake_server):
    script = ["The Question: is easy", "</think>", "\n\nAnswer: 4"]
    reply = fake_server(script, think=True).chat(stop=["Question:"])
    assert reply.said == ("Answer: 4", "The Question: is easy", "stop")


def test_a_stop_string_after_the_tag_in_the_same_piece_stops(fake_server):
    reply = fake_server(["hm</think>A Question: B"], think=True).chat(stop=["Question:"])
    assert reply.said == ("A ", "hm", "stop")


def test_without_a_split_a_stop_string_stops_the_thought_too(fake_server):
    """Design, section 4: with reasoning_format none and on /completion stops apply to all."""
    server = fake_server(["The Question: is easy", "</think>", "4"], think=True)
    reply = server.chat(stop=["Question:"], reasoning_format="none")
    assert reply.said == ("<think>\nThe ", "", "stop")
    assert server.completion(prompt="x", stop=["Question:"])["content"] == "The "


# ---- Case 16: overlapping stop strings -----------------------------------------------------------


@pytest.mark.parametrize("stop", [["cd", "bcd", "abcdX"], ["abcdX", "bcd", "cd"]])
def test_of_stops_that_end_together_the_longest_wins_whatever_their_order(fake_server, stop):
    server = fake_server(["-", "a", "b", "c", "d", "e"])
    assert server.chat(stop=stop).said == ("-a", "", "stop")
    result = server.completion(prompt="x", stop=stop)
    assert (result["content"], result["stopping_word"]) == ("-a", "bcd")


def test_the_stop_that_ends_first_wins_over_a_longer_one_that_began_earlier(fake_server):
    """Design, section 4: at the first character that completes one. One piece or many, the same."""
    for script in (["-", "a", "b", "c", "d"], ["-abcd"]):
        result = fake_server(script).completion(prompt="x", stop=["abcd", "bc"])
        assert (result["content"], result["stopping_word"]) == ("-a", "bc")


# ---- Case 19: the template opens the thought -----------------------------------------------------


def test_a_thought_that_the_template_opened_is_split_off(fake_server):
    script = ["I should", "  greet.\n", "</", "think", ">\n\nHello"]
    reply = fake_server(script, think=True).chat()
    assert reply.said == ("Hello", "I should  greet.", "stop")


def test_with_thinking_off_everything_is_content(fake_server):
    server = fake_server(["Hello"], think=True)
    for members in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
    ):
        assert server.chat(**members).said == ("Hello", "", "stop")
    assert server.chat().said == ("", "Hello", "stop")


def test_a_thought_that_the_model_opens_itself_is_split_off_too(fake_server):
    for script in (["<think>", "\nhm", "</think>", "\n\n", "A"], ["<th", "ink>\nhm</th", "ink>A"]):
        assert fake_server(script).chat().said == ("A", "hm", "stop")


def test_a_tag_in_the_middle_of_an_answer_is_text(fake_server):
    assert fake_server(["Write ", "<think>", " first"]).chat().content == "Write <think> first"


def test_without_a_split_the_tags_stay_in_the_content(fake_server):
    server = fake_server(["hm", "</think>", "A"], think=True)
    assert server.chat(reasoning_format="none").content.endswith("hm</think>A")
    server = fake_server(["hm", "</think>", "A"], "--no-think-split", think=True)
    assert server.chat().content.endswith("hm</think>A")


# ---- Case 20: the limit inside the thought -------------------------------------------------------


def test_an_unfinished_thought_is_no_answer(fake_server):
    thought = ["step one", "step two"]
    server = fake_server([*thought, LENGTH], think=True)
    assert server.chat(max_tokens=2).said == ("", "step onestep two", "length")
    server = fake_server(thought, think=True)
    assert server.chat(max_tokens=2).said == ("", "step onestep two", "length")
    assert server.chat().said == ("", "step onestep two", "stop")


def test_a_tag_that_never_came_whole_stays_in_the_thought(fake_server):
    server = fake_server(["hm", "</thi"], think=True)
    assert server.chat().said == ("", "hm</thi", "stop")


# ---- Case 22: a trailing assistant message is continued ------------------------------------------

SURE = {"role": "assistant", "content": "Sure, "}
SURE_PARTS = {"role": "assistant", "content": [{"type": "text", "text": "Sure, "}]}
THINKING = [{"chat_template_kwargs": {"enable_thinking": wanted}} for wanted in (True, False)]


@pytest.mark.parametrize("kwargs", THINKING, ids=["thinking", "not-thinking"])
def test_an_empty_trailing_assistant_message_is_as_if_absent(fake_server, kwargs):
    server = fake_server(["x"], think=True)
    for content in ("", None, []):
        messages = [*HI, {"role": "assistant", "content": content}]
        assert server.rendered(messages=messages, **kwargs) == server.rendered(**kwargs)
        assert server.chat(messages=messages, **kwargs).finish == "stop"


@pytest.mark.parametrize("kwargs", THINKING, ids=["thinking", "not-thinking"])
def test_a_trailing_assistant_message_is_continued_with_the_thought_closed(fake_server, kwargs):
    server = fake_server(["here you are"], think=True)
    prompts = [server.rendered(messages=[*HI, last], **kwargs) for last in (SURE, SURE_PARTS)]
    assert prompts[0] == prompts[1]
    assert prompts[0].endswith("Sure, ")
    assert prompts[0].count("<think>") == prompts[0].count("</think>") == 1
    for last in (SURE, SURE_PARTS):
        reply = server.chat(messages=[*HI, last], **kwargs)
        assert reply.said == ("here you are", "", "stop")


@pytest.mark.parametrize("kwargs", THINKING, ids=["thinking", "not-thinking"])
def test_a_prefill_with_a_finished_thought_is_continued_as_answer(fake_server, kwargs):
    server = fake_server(["391"], think=True)
    last = {"role": "assistant", "content": "<think>done.</think>The answer is "}
    prompt = server.rendered(messages=[*HI, last], **kwargs)
    assert prompt.endswith("The answer is ") and "done." in prompt
    assert prompt.count("<think>") == prompt.count("</think>")
    assert server.chat(messages=[*HI, last], **kwargs).said == ("391", "", "stop")


def test_a_prefill_with_an_open_thought_is_continued_as_thought(fake_server):
    server = fake_server([" more", "</think>", "A"], think=True)
    last = {"role": "assistant", "content": "<think>\nso far"}
    assert server.rendered(messages=[*HI, last]).endswith("<think>\nso far")
    assert server.chat(messages=[*HI, last]).content == "A"


def test_a_prefill_works_with_a_template_that_knows_no_thoughts(fake_server):
    server = fake_server(["x"], template=tiny_model.CHAT_TEMPLATE)
    prompt = server.rendered(messages=[*HI, SURE])
    assert prompt.endswith("<|im_start|>assistant\nSure, ")
    assert server.chat(messages=[*HI, SURE]).content == "x"


# ---- What stands in front of an answer -----------------------------------------------------------


def test_without_a_split_the_tag_that_the_template_wrote_is_a_part_of_the_content(fake_server):
    server = fake_server(["I think", "</think>", "Hi"], think=True)
    reply = server.chat(reasoning_format="none")
    assert reply.content == "<think>\nI think</think>Hi" and not reply.reasoning
    assert server.chat(reasoning_format="none", stop=["\n", "<"]).content == "<think>\nI think"
    assert server.chat().content == "Hi"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_in_front_of_each_text(fake_server, stream):
    server = fake_server(["x", "y", " z"])
    body = {"prompt": ["Pre", [80, 114]], "echo": True, "stop": ["P", " z"], "max_tokens": 9}
    if stream:
        events = [json.loads(e) for e in server.stream("/v1/completions", body)[:-1]]
        rows = [row for event in events for row in event["choices"]]
    else:
        rows = server.ok("/v1/completions", body)["choices"]
    for index, text in enumerate(("Prexy", "Prxy")):
        assert "".join(row["text"] for row in rows if row["index"] == index) == text
    assert server.completion(prompt="Pre", echo=True)["content"] == "xy z"
