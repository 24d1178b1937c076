"""Properties of the text stages in exl3_serve.py (scanner, thoughts, pipeline), of JSON and checks.

Each stage is compared with a definition of a few lines that reads the whole text at once. The
alphabets are two to four letters, so that short random texts often meet marks and halves of marks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import engine as eng
import exl3_serve as serve
from exl3_serve import ApiError, Pipeline, Scanner, ThinkTags

quick = settings(deadline=None, max_examples=200)


# ==== Definitions =================================================================================


def first_stop(text, marks):
    """Design section 4, executable: (text before the stop, the stop, text after it)."""
    for end in range(1, len(text) + 1):
        found = [mark for mark in marks if text[:end].endswith(mark)]
        if found:
            mark = max(found, key=len)
            return text[: end - len(mark)], mark, text[end:]
    return text, "", ""


def first_undecided(text, marks):
    """The first position from which on the text is a proper prefix of a mark, else its length."""
    for start in range(len(text)):
        if any(len(text) - start < len(m) and m.startswith(text[start:]) for m in marks):
            return start
    return len(text)


def split_thought(text, tags, in_thought):
    """(thought, answer) of a whole text. White space next to a tag goes with the tag."""
    thoughts, after_tag = "", in_thought
    while True:
        if in_thought:
            thought, closed, text = text.partition(tags.close)
            thoughts += thought.strip() if closed else thought.lstrip()
            if not closed:
                return thoughts, ""
            in_thought, after_tag = False, True
        opening = next((o for o in tags.openings if text.lstrip().startswith(o)), None)
        if opening is None:
            return thoughts, text.lstrip() if after_tag else text
        text, in_thought = text.lstrip()[len(opening) :], True


def pieces_before(pieces, position):
    """The pieces of the text up to `position`, the last one cut where the position lies in it."""
    out = []
    for text, ids in pieces:
        if position > 0:
            out.append((text[:position], ids))
        position -= len(text)
    return out


def numbered(texts):
    """Pieces whose only token id is their number."""
    return [(text, (i,)) for i, text in enumerate(texts)]


def scan(scanner, pieces):
    """(released pieces, mark, text after the mark) of a whole stream."""
    released = []
    for i, (text, ids) in enumerate(pieces):
        out, mark, rest = scanner.feed(text, ids)
        released += out
        if mark:
            return released, mark, rest + "".join(t for t, _ in pieces[i + 1 :])
    return released + scanner.finish(), "", ""


def texts_of(alphabet, **sizes):
    return st.lists(st.text(alphabet, min_size=1, max_size=4), **sizes)


marks_ab = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


# ==== Scanner =====================================================================================


class TestScanner:
    @quick
    @given(marks=marks_ab, texts=texts_of("ab"))
    @example(marks=["aab"], texts=["aaab"])
    @example(marks=["b", "ab", "aab"], texts=["a", "a", "b"])
    @example(marks=["aba", "b"], texts=["ab", "a"])
    def test_the_earliest_completed_mark_is_found_and_the_longest_of_equals(self, marks, texts):
        """And the released pieces are those that came: none merged, none split but at the mark."""
        before, mark, after = first_stop("".join(texts), marks)
        pieces = numbered(texts)
        assert scan(Scanner(marks), pieces) == (pieces_before(pieces, len(before)), mark, after)

    @quick
    @given(marks=marks_ab, texts=texts_of("ab"))
    @example(marks=["ab"], texts=["ba", "a", "a"])
    def test_whole_pieces_are_held_only_while_they_may_become_a_mark(self, marks, texts):
        scanner, whole = Scanner(marks), ""
        for i, text in enumerate(texts):
            whole += text
            if first_stop(whole, marks)[1]:
                return
            scanner.feed(text, (i,))
            sizes = [len("".join(texts[: k + 1])) for k in range(i + 1)]
            undecided = first_undecided(whole, marks)
            expected = [(texts[k], (k,)) for k in range(i + 1) if sizes[k] > undecided]
            assert scanner.held == expected

    @quick
    @given(marks=marks_ab, text=st.text("ab"), data=st.data())
    def test_how_a_text_is_cut_into_pieces_does_not_matter(self, marks, text, data):
        cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)))))
        bounds = [0, *(c for c in cuts if c < len(text)), len(text)]
        texts = [text[i:j] for i, j in itertools.pairwise(bounds) if i < j]

        def joined(texts):
            released, mark, after = scan(Scanner(marks), numbered(texts))
            return "".join(t for t, _ in released), mark, after

        assert joined(texts) == joined(list(text)) == first_stop(text, marks)

    @quick
    @given(marks=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1), texts=texts_of("ab "))
    @example(marks=["ab"], texts=["b ", " ", " a", "b b"])
    @example(marks=["ab"], texts=["b ", "a", "a "])
    def test_with_glue_white_space_before_a_mark_goes_with_it(self, marks, texts):
        scanner, pieces, whole, released = Scanner(marks, glue=True), numbered(texts), "", []
        for i, piece in enumerate(pieces):
            whole += piece[0]
            before, mark, after = first_stop(whole, marks)
            out, found, rest = scanner.feed(*piece)
            released += out
            assert (found, rest) == (mark, after)
            if mark:
                assert released == pieces_before(pieces, len(before.rstrip()))
                assert scanner.held == []
                return
            sure = len(whole[: first_undecided(whole, marks)].rstrip())
            ends = [len("".join(texts[: k + 1])) for k in range(i + 1)]
            assert scanner.held == [pieces[k] for k in range(i + 1) if ends[k] > sure]
        assert released + scanner.finish() == pieces

    def test_with_glue_no_more_than_the_limit_of_white_space_is_held(self):
        scanner = Scanner(["ab"], glue=True)
        released = [p for _ in range(1000) for p in scanner.feed(" ")[0]]
        assert len(scanner.held) == serve.MAX_GLUED_SPACE
        assert len(released) + len(scanner.finish()) == 1000

    @quick
    @given(texts=texts_of("ab"), at=st.integers(0, 8))
    def test_a_mark_with_an_id_is_recognised_by_that_id_alone(self, texts, at):
        pieces = [(text, (1,)) for text in texts]
        assert scan(Scanner(["ab"], {7: "ab"}), pieces) == (pieces, "", "")
        with_tag = [*pieces[:at], ("ab", (7,)), *pieces[at:]]
        expected = (pieces[:at], "ab", "".join(texts[at:]))
        assert scan(Scanner(["ab"], {7: "ab"}), with_tag) == expected

    def test_a_token_that_shares_a_piece_with_held_characters_is_still_recognised(self):
        assert scan(Scanner(["<t>"], {7: "<t>"}), [("x", (1,)), ("\ufffd<t>y", (2, 7))]) == (
            [("x", (1,)), ("\ufffd", (2, 7))],
            "<t>",
            "y",
        )

    def test_finish_gives_back_what_was_held_once(self):
        scanner = Scanner(["abc"])
        assert scanner.feed("ab", (1,)) == ([], "", "")
        assert scanner.finish() == [("ab", (1,))]
        assert scanner.finish() == []

    @pytest.mark.parametrize("glue", [False, True])
    @pytest.mark.parametrize("mark", ["a" * 40 + "b", "ab" * 20, "b"])
    def test_the_work_per_piece_is_bounded_by_the_longest_mark(self, mark, glue):
        """Every feed looks at the held text and the new piece, so this bound makes it linear."""
        scanner, n_released, n_looked_at = Scanner([mark], glue=glue), 0, 0
        for _ in range(100_000):
            n_looked_at += 1 + sum(len(text) for text, _ in scanner.held)
            n_released += len(scanner.feed("a")[0])
        assert n_released + len(scanner.finish()) == 100_000
        assert n_looked_at <= 100_000 * (len(mark) + 1)


# ==== Thought splitter ============================================================================

TAGS = ThinkTags(("<>",), "</>")
OPEN, CLOSE = 900, 901


def split(texts, in_thought=True, tags=TAGS, ids=None):
    """The deltas of a whole text in which no stop string is looked for."""
    line = Pipeline(tags, ids or {}, in_thought)
    pieces = texts if texts and isinstance(texts[0], tuple) else numbered(texts)
    return [delta for text, i in pieces for delta in line.feed(text, i)] + line.finish()


def held_in(line):
    return sum(len(scanner.held) for scanner in line.scanners.values())


def joined(deltas, kind):
    return "".join(text for k, text in deltas if k == kind)


class TestThoughts:
    @settings(quick, max_examples=400)
    @given(texts=texts_of("<>/ a"), in_thought=st.booleans())
    @example(texts=["a", "\n", "</", ">", "\n\n", "a"], in_thought=True)
    @example(texts=[" <", "> a </> ", " <> a", "</>a"], in_thought=False)
    @example(texts=[" a <>", "a</>"], in_thought=False)
    @example(texts=["a </> "], in_thought=True)
    def test_thought_and_answer_are_what_the_definition_says(self, texts, in_thought):
        parts = split(texts, in_thought)
        found = joined(parts, "reasoning"), joined(parts, "content")
        assert found == split_thought("".join(texts), TAGS, in_thought)

    @settings(quick, max_examples=400)
    @given(texts=texts_of("<>/ a"), in_thought=st.booleans())
    def test_no_piece_is_split_or_merged_but_next_to_a_tag(self, texts, in_thought):
        letters = [chr(0x4E00 + i) for i in range(len(texts))]  # each piece has its own
        texts = [text.replace("a", own) for text, own in zip(texts, letters, strict=True)]
        last = 0
        for _, text in split(texts, in_thought):
            assert text
            for number in {letters.index(letter) for letter in text if letter in letters}:
                assert number >= last and text in texts[number]
                last = number
                if set(texts[number]) == {letters[number]}:
                    assert text == texts[number]

    @quick
    @given(
        pieces=st.lists(
            st.one_of(
                st.sampled_from([("<>", (OPEN,)), ("</>", (CLOSE,))]),
                texts_of("<>/ a", min_size=1, max_size=1).map(lambda t: (t[0], (1,))),
            )
        ),
        in_thought=st.booleans(),
    )
    def test_tags_that_are_tokens_are_recognised_by_their_id_alone(self, pieces, in_thought):
        """The definition reads a text in which the two tokens are characters of their own."""
        text = "".join({OPEN: "[", CLOSE: "]"}.get(ids[0], text) for text, ids in pieces)
        thought, answer = split_thought(text, ThinkTags(("[",), "]"), in_thought)
        parts = split(pieces, in_thought, ids={OPEN: "<>", CLOSE: "</>"})
        tokens = str.maketrans({"[": "<>", "]": "</>"})
        assert joined(parts, "reasoning") == thought.translate(tokens)
        assert joined(parts, "content") == answer.translate(tokens)

    def test_an_opening_tag_inside_the_answer_is_text(self):
        assert split(["a", "<>", "b", "</>", "c"], False) == [
            ("content", text) for text in ["a", "<>", "b", "</>", "c"]
        ]

    def test_a_thought_that_is_never_closed_stays_a_thought(self):
        assert joined(split(["a", "<", "/"], True), "reasoning") == "a</"
        assert joined(split(["<>", "a"], False), "reasoning") == "a"

    def test_an_answer_is_held_only_while_it_may_open_a_thought(self):
        line = Pipeline(TAGS, {}, False)
        assert line.feed(" ", (0,)) == []
        assert line.feed("<", (1,)) == []
        assert line.feed("a", (2,)) == [("content", " "), ("content", "<"), ("content", "a")]
        assert line.feed("<>", (3,)) == [("content", "<>")]

    def test_text_that_only_looks_like_a_tag_with_an_id_is_not_held(self):
        assert Pipeline(TAGS, {OPEN: "<>"}, False).feed("<", (1,)) == [("content", "<")]

    def test_an_answer_of_white_space_alone_is_not_held_for_ever(self):
        line = Pipeline(TAGS, {}, False)
        deltas = [delta for i in range(1000) for delta in line.feed(" ", (i,))]
        assert len(deltas) == 1000 and not held_in(line)

    def test_the_work_per_piece_is_bounded(self):
        for texts, n in ((["a"], 100_000), ([" "], 10_000), (["<", "/"], 50_000)):
            line, held = Pipeline(TAGS, {}, True), 0
            for i in range(n):
                for text in texts:
                    line.feed(text, (i,))
                held = max(held, held_in(line))
            assert held <= serve.MAX_GLUED_SPACE


# ==== Pipeline ====================================================================================

THINK = serve.THINK_TAGS[-1]


def pipeline(stops=(), in_thought=None, tags=THINK, ids=None):
    return Pipeline(tags, ids or {}, in_thought, serve.parse_stops(list(stops), "stop"))


def run(line, texts, cut=False):
    """(reasoning, content, stop string) as Answer drives it: nothing is fed after a stop."""
    deltas = []
    for text in texts:
        deltas += line.feed(text, ())
        if line.stopped:
            break
    deltas += line.finish()
    return joined(deltas, "reasoning"), joined(deltas, "content"), line.stopped


class TestPipeline:
    @settings(quick, max_examples=400)
    @given(
        stops=st.lists(st.text("<>/ a", min_size=1, max_size=3), max_size=3),
        texts=texts_of("<>/ a"),
        in_thought=st.sampled_from([None, False, True]),
    )
    def test_stops_apply_to_the_answer_and_not_to_the_thought(self, stops, texts, in_thought):
        text = "".join(texts)
        thought, answer = (
            ("", text) if in_thought is None else split_thought(text, TAGS, in_thought)
        )
        answer, stop, _ = first_stop(answer, stops)
        assert run(pipeline(stops, in_thought, TAGS), texts) == (thought, answer, stop)

    @quick
    @given(stops=marks_ab, texts=texts_of("ab"))
    def test_every_piece_with_text_is_one_delta_of_its_own(self, stops, texts):
        line = pipeline(stops)
        deltas = [delta for text in texts for delta in line.feed(text, ())]
        deltas += line.finish()
        kept = pieces_before(numbered(texts), len(first_stop("".join(texts), stops)[0]))
        assert deltas == [("content", text) for text, _ in kept]

    @quick
    @given(stops=marks_ab, texts=texts_of("ab<>/"), in_thought=st.sampled_from([None, False, True]))
    def test_pieces_that_wait_are_counted(self, stops, texts, in_thought):
        """Held are how many of the pieces fed have text that is still inside, tags not counted."""
        line = pipeline(stops, in_thought, TAGS)
        for text in texts:
            line.feed(text, ())
            if line.stopped:
                assert not held_in(line)
                return
        n_held = held_in(line)
        flushed = line.finish()
        assert len(flushed) == n_held or line.stopped

    def test_nothing_comes_after_a_stop(self):
        line = pipeline(["b"])
        assert line.feed("ab", ()) == [("content", "a")]
        assert line.feed("a", ()) == []
        assert line.finish() == []

    @pytest.mark.parametrize(
        ("stops", "texts", "content", "stop"),
        [
            (["three four"], ["one two ", "thr", "ee fo", "ur five", " six"], "one two ", 0),
            (["###END"], ["a ", "##", " b", "#"], "a ## b#", None),
            (["\n"], ["x", "?\ny"], "x?", 0),
            (["STOP"], ["k STOP tail"], "k ", 0),
        ],
    )
    def test_case_13_a_stop_over_several_tokens(self, stops, texts, content, stop):
        expected = "" if stop is None else stops[stop]
        assert run(pipeline(stops), texts) == ("", content, expected)
        assert run(pipeline(stops, in_thought=False), texts) == ("", content, expected)

    def test_case_14_a_stop_inside_the_thought_is_text(self):
        texts = ["The Question: is easy", "</think>", "\n\nAnswer: 4"]
        expected = ("The Question: is easy", "Answer: 4", "")
        assert run(pipeline(["Question:"], in_thought=True), texts) == expected
        texts = ["hm</think>A Question: B"]
        assert run(pipeline(["Question:"], in_thought=True), texts) == ("hm", "A ", "Question:")

    def test_case_16_of_overlapping_stops_the_first_completed_and_longest_counts(self):
        stops = ["cd", "bcd", "abcdX"]
        assert run(pipeline(stops), ["-", "a", "b", "c", "d", "e"]) == ("", "-a", "bcd")

    def test_case_19_a_thought_that_the_template_opened(self):
        texts = ["I should", "  greet.\n", "</", "think", ">\n\nHello"]
        assert run(pipeline(in_thought=True), texts) == ("I should  greet.", "Hello", "")
        assert run(pipeline(in_thought=False), ["Hello"]) == ("", "Hello", "")

    def test_case_20_the_limit_inside_the_thought(self):
        texts = ["step one", "step two"]
        assert run(pipeline(in_thought=True), texts, cut=True) == ("step onestep two", "", "")
        assert run(pipeline(in_thought=True), texts) == ("step onestep two", "", "")


# ==== Incremental UTF-8 ===========================================================================


def fake_pieces(script):
    """The pieces that the fake engine makes of a script."""
    args = argparse.Namespace(fake_delay=0.0, fake_script=None, cache_size=1 << 20)
    backend, pieces = eng.FakeBackend(args, "fake"), []
    backend.script = script
    backend.submit(eng.Job(eng.GenerationParams([1], 1 << 20), lambda update: None, id_task=0))
    while backend.remaining():
        for update in backend.iterate():
            pieces += update.pieces
    return pieces


def as_script(data, cuts):
    bounds = [0, *sorted(c for c in cuts if 0 < c < len(data)), len(data)]
    return [data[i:j] for i, j in itertools.pairwise(bounds) if i < j]


class TestIncrementalUtf8:
    @quick
    @given(text=st.text("a東🦜\ufffdé"), cuts=st.sets(st.integers(0, 40)))
    def test_a_character_is_never_broken_and_never_lost(self, text, cuts):
        script = as_script(text.encode(), cuts)
        pieces = fake_pieces(script)
        assert "".join(p.text for p in pieces) == text
        assert all(p.text for p in pieces[:-1])
        assert sum(p.text.count("\ufffd") for p in pieces) == text.count("\ufffd")

    @quick
    @given(data=st.binary(max_size=12), cuts=st.sets(st.integers(0, 12)))
    @example(data=b"\xf0\x9f", cuts=set())
    @example(data=b"\xf0\x9f\xa6a", cuts={1, 2, 3})
    def test_bytes_that_are_no_text_become_what_python_makes_of_them(self, data, cuts):
        pieces = fake_pieces(as_script(data, cuts))
        assert "".join(p.text for p in pieces) == data.decode("utf-8", "replace")

    @quick
    @given(text=st.text("a東🦜", min_size=1), cuts=st.sets(st.integers(0, 40)))
    def test_every_token_is_in_exactly_one_piece(self, text, cuts):
        script = as_script(text.encode(), cuts)
        pieces = fake_pieces([*script, {"end": "length"}])
        assert sum(len(p.ids) for p in pieces) == len(script) == pieces[-1].n_decoded


# ==== JSON ========================================================================================

surrogates = st.sampled_from("\ud800\udbff")  # halves that never make a pair
json_text = st.text(st.one_of(st.sampled_from('a"\\\n\x00\x85\u2028\u2029é🦜'), surrogates))
json_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), json_text
    ).filter(lambda v: not (isinstance(v, float) and math.isinf(v))),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(json_text, inner)),
    max_leaves=5,
)


class TestJson:
    @settings(quick, max_examples=60)
    @given(st.dictionaries(json_text, json_values))
    def test_any_object_survives_the_way_out_and_in(self, value):
        sent = serve.dumps(value)
        assert sent.isascii()
        assert b"\n" not in sent and b"\r" not in sent
        assert serve.loads(sent) == value

    @pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
    def test_a_number_that_is_not_json_is_never_sent(self, number):
        with pytest.raises(ValueError):
            serve.dumps({"a": [number]})

    @pytest.mark.parametrize(
        "body",
        [b"", b"{", b"[]", b"[{}]", b"1", b'"a"', b"null", b"true", b"{'a': 1}", b'{"a": 1,}']
        + [b'{"a": %b}' % word for word in (b"NaN", b"Infinity", b"-Infinity", b"[NaN]")]
        + [b'{"a": "\xff"}', b'{"a": "\xf0\x9f"}', b'{"a": "\n"}', b"\x00", b'{"a": 1} x']
        + [b'{"a": 1e400}', b'{"a": [-1e999]}'],
    )
    def test_anything_but_a_json_object_is_a_400(self, body):
        with pytest.raises(ApiError) as caught:
            serve.loads(body)
        assert caught.value.status == 400

    @pytest.mark.parametrize("opening", [b"[", b'{"a":'])
    @pytest.mark.parametrize("depth", [10_000, 1_000_000])
    def test_deep_nesting_is_a_400_and_no_crash(self, opening, depth):
        with pytest.raises(ApiError, match="nested") as caught:
            serve.loads(b'{"a":' + opening * depth)
        assert caught.value.status == 400

    @quick
    @given(st.binary())
    def test_any_bytes_are_an_object_or_a_400(self, body):
        try:
            assert isinstance(serve.loads(body), dict)
        except ApiError as error:
            assert error.status == 400


# ==== Fields ======================================================================================


def is_lawful(rule, value):
    """What a row of FIELDS says, in other words."""
    if isinstance(rule.kind, tuple):
        return value in rule.kind
    if rule.kind is bool or isinstance(value, bool):
        return rule.kind is bool and isinstance(value, bool)
    if rule.kind in (int, float):
        if not isinstance(value, (int, float)) or abs(value) == math.inf:
            return False
        return rule.low <= value <= rule.high and (rule.kind is float or value == int(value))
    if isinstance(value, list) and not all(isinstance(item, rule.item) for item in value):
        return False
    return isinstance(value, rule.kind) and rule.low <= len(value) <= rule.high


any_value = st.one_of(
    st.booleans(),
    st.integers(-130, 130),
    st.floats(-130, 130),
    st.sampled_from([-1, 0, 1, 100, 1e3, -1.0, 2**31, 0.5, "", "a", [], [1], {}, {"a": 1}]),
    st.text(max_size=2),
    st.lists(st.sampled_from([None, "a", {}, 1]), max_size=2),
    st.dictionaries(st.text(max_size=1), st.none(), max_size=2),
)
NUMBER_FIELDS = sorted(n for n, rule in serve.FIELDS.items() if rule.kind in (int, float))


class TestFields:
    @settings(quick, max_examples=1000)
    @given(name=st.sampled_from(sorted(serve.FIELDS)), value=any_value)
    def test_every_field_takes_what_its_row_says_and_nothing_else(self, name, value):
        rule = serve.FIELDS[name]
        if is_lawful(rule, value):
            got = serve.checked({name: value})[name]
            assert got == value
            if not isinstance(rule.kind, tuple):
                assert isinstance(got, (int, float) if rule.kind is float else rule.kind)
        else:
            with pytest.raises(ApiError) as caught:
                serve.checked({name: value})
            assert caught.value.status == 400
            assert f"'{name}'" in caught.value.message

    @pytest.mark.parametrize("name", NUMBER_FIELDS)
    def test_no_number_field_takes_what_no_machine_word_holds(self, name):
        for value in (10**400, -(10**400), math.inf, -math.inf, math.nan):
            with pytest.raises(ApiError, match=name):
                serve.checked({name: value})

    @pytest.mark.parametrize("name", sorted(serve.FIELDS))
    def test_null_is_as_if_absent(self, name):
        assert serve.checked({name: None}) == {}

    @quick
    @given(st.dictionaries(st.text("xyz", min_size=1), st.sampled_from([None, 1, "", [], {}, 1e9])))
    def test_unknown_fields_pass_unseen(self, body):
        expected = {name: value for name, value in body.items() if value is not None}
        assert serve.checked(body) == expected

    @pytest.mark.parametrize("name", sorted(serve.ABSENT_SAMPLERS))
    def test_a_sampler_that_is_absent_is_accepted_only_when_off(self, name):
        off = serve.ABSENT_SAMPLERS[name]
        serve.checked({name: off})
        serve.checked({name: float(off)})
        for value in (off + 2, 0.3, "on", [], True):
            with pytest.raises(ApiError, match=name) as caught:
                if value != off:
                    serve.checked({name: value})
                else:  # True is 1, and 1 is off for typical_p
                    raise serve.bad(name)
            assert caught.value.status == 400


class TestStops:
    @quick
    @given(st.lists(st.one_of(st.none(), st.text("ab", max_size=2))))
    def test_empty_and_null_stops_are_no_stops(self, stops):
        got = serve.parse_stops(stops, "stop")
        assert set(got) == {stop for stop in stops if stop}
        assert len(got) == len(set(got))

    @pytest.mark.parametrize("value", [None, "", [], [""], [None], ["", None]])
    def test_all_spellings_of_none_are_accepted(self, value):
        assert serve.parse_stops(value, "stop") == ()

    def test_one_string_is_a_list_of_one(self):
        assert serve.parse_stops("ab", "stop") == ("ab",)

    @pytest.mark.parametrize(
        "value",
        [0, 1, 1.5, True, False, {}, {"a": 1}, [1], [["a"]], [False], [{}]]
        + [["a"] * (serve.MAX_STOPS + 1), "a" * (serve.MAX_STOP_CHARS + 1)]
        + [["a" * (serve.MAX_STOP_CHARS + 1)]],
        ids=str,
    )
    def test_other_types_and_sizes_are_a_400_that_names_the_field(self, value):
        with pytest.raises(ApiError, match="'stop'") as caught:
            serve.parse_stops(value, "stop")
        assert caught.value.status == 400


class TestLogitBias:
    model = SimpleNamespace(
        info=SimpleNamespace(n_vocab=1000), tokenize=lambda text, special, name: list(text.encode())
    )

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ([], {}),
            ({}, {}),
            ({"5": 1.5, "7": -100}, {5: 1.5, 7: -100}),
            ({"5": False}, {5: -math.inf}),
            ([[5, 1.5], [7, False]], {5: 1.5, 7: -math.inf}),
            ([["a", 2], ["bc", -1]], {97: 2, 98: -1, 99: -1}),
            ([["15", 2]], {15: 2}),
        ],
        ids=str,
    )
    def test_all_spellings_of_llama_server_are_understood(self, value, expected):
        assert serve.parse_logit_bias(value, self.model) == expected

    @pytest.mark.parametrize(
        "value",
        [0, 1, "", "5", True, False, [5], [[5]], [[5, 1, 2]], [5, 1], {"x": "1"}, {"5": "1"}]
        + [{"1000": 1}, {"-1": 1}, [[1000, 1]], [[-1, 1]], [[1.5, 1]], [[True, 1]], [[None, 1]]]
        + [[[5, True]], [[5, None]], [[5, "1"]], [[5, math.inf]], [[5, math.nan]], [[[5], 1]]]
        + [[{"a": 1}], [None], {"5": None}, {"5": 10**400}, {"5" * 5000: 1}],
        ids=lambda value: str(value)[:40],
    )
    def test_anything_else_is_a_400_that_names_the_field(self, value):
        with pytest.raises(ApiError, match="'logit_bias'") as caught:
            serve.parse_logit_bias(value, self.model)
        assert caught.value.status == 400


# ==== Figures =====================================================================================

# A clock's difference is 0 or at least its resolution; a day is more than any request takes
seconds = st.one_of(st.just(0.0), st.floats(1e-9, 86400))
counts = st.integers(0, 1 << 40)


def refuse(name):
    raise AssertionError(f"{name} is not JSON")


figures = st.builds(
    eng.Update,
    st.none(),
    n_cached=counts,
    prompt_s=seconds,
    predicted_s=seconds,
    n_draft=counts,
    n_draft_accepted=counts,
)


class TestTimings:
    @settings(quick, max_examples=50)
    @given(steps=st.lists(st.tuples(figures, counts), min_size=1, max_size=3), n_new=counts)
    def test_timings_are_json_and_agree_with_each_other(self, steps, n_new):
        """Also when the figures of one answer change in between: nothing stale is kept."""
        for update, n_decoded in steps:
            n_prompt = update.n_cached + n_new
            choice = SimpleNamespace(last=update, n_prompt=n_prompt, n_decoded=n_decoded)
            timings = json.loads(serve.Choice.timings(choice), parse_constant=refuse)
            assert (timings["cache_n"], timings["prompt_n"]) == (update.n_cached, n_new)
            assert timings["predicted_n"] == n_decoded
            self.check_rates(timings, "prompt", n_new, update.prompt_s)
            self.check_rates(timings, "predicted", n_decoded, update.predicted_s)
            if update.n_draft:
                drafted = timings["draft_n"], timings["draft_n_accepted"]
                assert drafted == (update.n_draft, update.n_draft_accepted)

    def check_rates(self, timings, name, n, s):
        s = s if n or name == "prompt" else 0.0  # no token, no time of it: true at each token
        close = {"rel": 1e-6, "abs": 1e-5}
        assert timings[f"{name}_ms"] == pytest.approx(s * 1e3, rel=1e-6, abs=1e-3)
        assert timings[f"{name}_per_second"] == pytest.approx(n / s if s else 0.0, **close)
        if n:
            assert timings[f"{name}_per_token_ms"] == pytest.approx(s * 1e3 / n, **close)
