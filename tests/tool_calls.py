"""Tool calls for every model family: a table of wire forms, one parser, one grammar builder.

Not part of the server yet: issue by issue the three modules have a budget of code lines, and this
part alone is 700 of them. It stands here, proven by test_tools.py, until there is room for it
in exl3_serve.py; a request with `tools` gets its prompt rendered, and what the model writes comes
back as text.
"""

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

# ---- Tool calls: the families ------------------------------------------------------------------
#
# A family of models is a row of data: a call as the model writes it, with placeholders for what
# varies: {name}; one of {json}, {object}, {parameters}, {gemma} for the arguments; {n} for digits,
# {id} for nine letters or digits. The parser and the grammar read the same texts. To the parser
# whitespace in them is optional, and each line before the name is enough to open a call
# (Qwen3-Coder forgets `<tool_call>`), unless the tokenizer has a token for the first.
#
# What cannot be read as a call comes back as content, with its markup. A call of a function that
# was not declared is still a call, as in vLLM and as agents expect, who answer it with an error;
# only where a call has no marker (`at_start`) must the name be declared, else it is plain JSON.

Json = dict[str, Any]
# ("content", text) | ("call", index, id, name) | ("arguments", index, text)
Delta = tuple[Any, ...]
Steps = Generator[None, None, Any]  # a part of the parser: yields where it needs more text
_MARKER = re.compile(r'<[|｜]?/?[\w:▁]+[|｜]?>|<\|"\|>|\[[A-Z_]+\]|[\udc00-\udcff]')
_QUOTE = '<|"|>'  # around strings in {gemma}
_HEADERS = ("<|start|>", "<|channel|>")  # what opens the header of a message; <|message|> ends it


@dataclass(frozen=True)
class ToolFamily:
    """How one family of models writes tool calls; `--tool-format-file` has the same field names.

    call: {json} is an object; {object} too, inside of an object that holds the name as well;
    {parameters} is a `parameter` for each; {gemma} is `{key:value}`, strings between <|"|>.
    """

    name: str
    call: str
    parameter: str = ""  # with {key} and {value}, perhaps {string}: true or false
    section: str = "{call}\n{call}"  # all calls of an answer; one {call}: there can be only one
    at_start: bool = False  # a call is recognised only where the answer starts
    silent: str = ""  # markup without a meaning for us, separated by spaces: it vanishes
    plain: str = ""  # if messages have headers: that of text for the user (`call` has its own)
    recognise: str = ""  # lines that are in all its templates, if not simply what opens a call

    def __post_init__(self) -> None:
        for field, value in asdict(self).items():
            if type(value) is not type(getattr(type(self), field, "")):
                raise ValueError(f"tool format: {field} must not be {value!r}")
        whole = len(self.parts) == 3 and "{name}" in self.call and "{call}" in self.section
        keyed = re.search("{key}.*{value}", self.parameter, re.S)
        whole = whole and bool(keyed) == (self.style == "parameters")
        if not whole or not (self.openers or self.plain):
            raise ValueError(
                "tool format: call needs something to recognise it by, {name} and one of {json},"
                " {object}, {gemma}, {parameters} (then parameter: {key}, {value}); section: {call}"
            )

    @staticmethod
    def load(path: str) -> "ToolFamily":
        """Read a row from a JSON file. Raises OSError or ValueError with the reason."""
        with open(path, encoding="utf-8") as file:
            try:
                return ToolFamily(**json.load(file))
            except TypeError as exc:  # unknown or missing fields: Python names them
                raise ValueError(f"tool format in {path}: {exc}") from None

    @cached_property
    def parts(self) -> list[str]:
        """What stands before the arguments, the style of the arguments, what stands after them."""
        return re.split(r"{(json|object|parameters|gemma)}", self.call)

    @property
    def style(self) -> str:
        return self.parts[1]

    @cached_property
    def around(self) -> tuple[str, str, str]:
        """What stands before all calls, between two and after all."""
        first, *between, last = self.section.split("{call}")
        return first, "".join(between), last

    @cached_property
    def openers(self) -> dict[str, list[str]]:
        """What opens a call -> the words that must follow before its name or object."""
        before = self.parts[0]
        if self.plain:  # what ends its header ends the header of a call
            before = before.split(_MARKER.findall(self.plain)[-1])[-1]
        prefix = re.split(r'\{\s*"' if self.style == "object" else "{name}", before)[0]
        lines = [line for line in f"{self.around[0]}\n{prefix}".split("\n") if line]
        openers: dict[str, list[str]] = {} if lines or self.style != "object" else {"{": []}
        for i, line in enumerate(lines):
            first, *rest = words(line)
            openers.setdefault(first, rest + words("\n".join(lines[i + 1 :])))
        return openers

    @property
    def markers(self) -> set[str]:
        """The parts of the markup that may be single tokens: look these up for `token_ids`."""
        texts = [self.call, self.parameter, self.section, self.silent, self.plain]
        texts += [_QUOTE] if self.style == "gemma" else _HEADERS if self.plain else []
        return set(_MARKER.findall("\n".join(texts)))


def words(text: str) -> list[str]:
    """Split markup where whitespace may stand: at its own whitespace and after a marker."""
    return re.findall(rf"(?<!\S)(?:{_MARKER.pattern})|\S+", text)


_OBJECT = '{"name": "{name}", "arguments": {object}}'
_DSML = (
    '<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>',
    '<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n',
)
FAMILIES = (
    ToolFamily(
        "muse",
        ' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n{parameters}'
        "</atem:invoke>\n</atem:function_calls>",
        '<atem:parameter name="{key}">{value}</atem:parameter>\n',
        "{call}<|eom|><|start|>assistant{call}",
        silent="<|eom|> <|eot|>",
        plain=" to=user<|message|>",
    ),
    ToolFamily(
        "minimax_m2",
        '<invoke name="{name}">\n{parameters}</invoke>',
        '<parameter name="{key}">{value}</parameter>\n',
        "<minimax:tool_call>\n{call}\n{call}\n</minimax:tool_call>",
    ),
    ToolFamily(
        "deepseek_dsml",
        *_DSML,
        "<｜DSML｜tool_calls>\n{call}\n{call}\n</｜DSML｜tool_calls>",
        recognise="｜DSML｜\ntool_calls>",
    ),
    ToolFamily(
        "deepseek_v32",
        *_DSML,
        "<｜DSML｜function_calls>\n{call}\n{call}\n</｜DSML｜function_calls>",
        recognise="｜DSML｜\nfunction_calls>",
    ),
    ToolFamily(
        "deepseek_v3",
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json}<｜tool▁call▁end｜>",
        section="<｜tool▁calls▁begin｜>{call}{call}<｜tool▁calls▁end｜>",
    ),
    ToolFamily(
        "kimi_k2",
        "<|tool_call_begin|>functions.{name}:{n}"
        "<|tool_call_argument_begin|>{json}<|tool_call_end|>",
        section="<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>",
    ),
    ToolFamily(
        "gemma4",
        "<|tool_call>call:{name}{gemma}<tool_call|>",
        section="{call}{call}",
        silent="<|tool_response>",
    ),
    ToolFamily(
        "glm",
        "<tool_call>{name}\n{parameters}</tool_call>",
        "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
    ToolFamily(
        "qwen3_xml",
        "<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
        "<parameter={key}>\n{value}\n</parameter>\n",
    ),
    ToolFamily(
        "harmony",
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json}<|call|>",
        section="{call}",
        silent="<|end|> <|return|> <|call|>",
        plain="<|channel|>final<|message|>",
        recognise="<|channel|>\n<|call|>",
    ),
    ToolFamily(
        "mistral_v11", "[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{json}", section="{call}{call}"
    ),
    ToolFamily("mistral", "[TOOL_CALLS]{name}[ARGS]{json}", section="{call}{call}"),
    ToolFamily("mistral_list", _OBJECT, section="[TOOL_CALLS][{call}, {call}]"),
    ToolFamily("granite", _OBJECT, section="<|tool_call|>[{call}, {call}]"),
    ToolFamily(
        "llama3_json",
        '{"name": "{name}", "parameters": {object}}',
        section="{call}",
        at_start=True,
        silent="<|python_tag|>",
        recognise='{"name": function name, "parameters"',
    ),
    ToolFamily("hermes", f"<tool_call>\n{_OBJECT}\n</tool_call>"),
    ToolFamily("generic", _OBJECT, section='{"tool_calls": [{call}, {call}]}', at_start=True),
)


def find_family(template_text: str, special_tokens: Iterable[str]) -> ToolFamily:
    """The first family all of whose texts stand in the template; else, in the template or among the
    special tokens; else the generic one, which comes last."""
    for text in (template_text, "\n".join([template_text, *special_tokens])):
        for family in FAMILIES[:-1]:
            opening = [*family.openers, family.parameter.split("{")[0].strip()]
            opening += _MARKER.findall(family.parts[0])
            marks = family.recognise.split("\n") if family.recognise else opening
            if all(mark in text for mark in marks):
                return family
    return FAMILIES[-1]


# ---- Tool calls: arguments and their schemas ---------------------------------------------------


class _NotACall(Exception):
    """What was begun as a call does not go on as one."""


def _loads(text: str) -> Any:
    """Strict JSON, or _NotACall."""
    try:
        return json.loads(text, parse_constant=lambda name: json.loads(f"-{name}"))
    except (ValueError, RecursionError):
        raise _NotACall from None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _type_of(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return "integer"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else kinds.get(type(value), "object")


def schema_branches(schema: Any, root: Any, depth: int = 0) -> list[Json]:
    """The alternatives of a schema, each with one "type" or none ({}: anything)."""
    if not isinstance(schema, dict) or depth > 16:
        return [{}]
    if isinstance(ref := schema.get("$ref"), str):
        target = root
        for part in ref.split("/")[1:]:
            target = target.get(part) if isinstance(target, dict) else None
        return schema_branches(target, root, depth + 1)
    several = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(several, list):
        return [b for s in several for b in schema_branches(s, root, depth + 1)]
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return [{"type": _type_of(v), "enum": [v]} for v in values]
    types = schema.get("type")
    return [{**schema, "type": t} for t in types] if isinstance(types, list) else [schema]


def typed_json(text: str, types: set[str | None]) -> str:
    """The JSON of a parameter written as bare text. A value that is no JSON of a declared type is
    kept as a string; an integer 007 is 7; undeclared parameters are JSON if they parse."""
    bare = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    if types & {"integer", "number"}:
        bare = re.sub(r"^\+?(-?)0*(?=\d)", r"\1", bare)
    try:
        kind = _type_of(_loads(bare))
    except _NotACall:
        return _quoted(text)
    fits = kind in types or (kind == "integer" and "number" in types)
    return bare if fits or (None in types and kind != "string") else _quoted(text)


def arguments_json(text: str) -> str:
    """The arguments of a call: null, "" and nothing are {}, and a string may hold the object.

    Raises _NotACall if there is no object in it."""
    value = _loads(text) if text.strip() else None
    if isinstance(value, str):
        text, value = value, _loads(value) if value.strip() else None
    if not isinstance(value, dict | None):
        raise _NotACall
    return "{}" if value is None else text


# ---- Tool calls: the parser --------------------------------------------------------------------

_SPACE = re.compile(r"\s*")
_PLAIN = re.compile(r'[\s\d,:.+\-Ea-z]*(["{}\[\]]?)')  # JSON up to a string or bracket
_STRING = re.compile(r'(?:[^"\\]|\\.)*("?)', re.S)  # and up to the end of a string
_SCALAR = re.compile(r"[\w.+\-]*()")
_CONTROLS = {i: json.dumps(chr(i))[1:-1] for i in range(32)}
_ARGUMENTS = ("arguments", "parameters")
_LIMIT = 512  # characters of a name, a key or a header: more is not one


def _finder(
    texts: Iterable[str], lead: str = "", then: Sequence[str] = ()
) -> list[re.Pattern[str]]:
    """Regexes that find the first of the texts, and at the end of a text what may begin one.

    then: only before these does it count: a closer inside of a string may be a part of it."""

    def begun(texts: Iterable[str], tail: str = "") -> str:
        nested = ("".join(f"(?:{re.escape(c)}" for c in t) + tail + ")?" * len(t) for t in texts)
        return "|".join(nested)

    one = "|".join(map(re.escape, texts)) or "(?!)"
    after = rf"(?=\s{{0,64}}(?:{'|'.join(map(re.escape, then))}))"
    tail = rf"\s{{0,64}}(?:{begun(then)})" if then else ""
    found = rf"{lead}({one}){after if then else ''}"
    return [re.compile(found), re.compile(rf"{lead}(?:{begun(texts, tail)})\Z")]


def _sure(match: re.Match[str] | None) -> re.Match[str]:
    """The match of a pattern that at least matches nothing."""
    assert match is not None
    return match


class ToolParser:
    """Turns the pieces of an answer into deltas: content, and calls as they are written.

    What `feed` has returned never changes, and joined it does not depend on how the text was cut.
    In content one piece is one delta. Pieces are held back whole, and only while they end in
    whitespace or in what may be the beginning of a marker. Inside, a marker known by its token id
    is one lone surrogate, which no decoded text contains: so the code below compares only strings.

    The parser is a coroutine over `_buf` from `_pos` on: straight code that yields for more text.
    An exception _NotACall means: what began as a call is none; its text becomes content. This also
    happens to a call already announced, which then is not counted in `n_calls`.
    """

    def __init__(
        self, family: ToolFamily, tools: Json, token_ids: dict[str, int], new_id: Callable[[], str]
    ) -> None:
        """tools: declared names -> JSON schema of the parameters. token_ids: the ids of those
        `family.markers` that are one token; `feed` must then get their text and their ids."""
        self._tools, self._new_id = tools, new_id
        self._ids = {token_ids[marker]: marker for marker in family.markers if marker in token_ids}
        self._signs = {marker: chr(0xDC00 + i) for i, marker in enumerate(self._ids.values())}
        self._texts = {ord(sign): marker for marker, sign in self._signs.items()}
        self._verbatim = _CONTROLS | {i: _quoted(text)[1:-1] for i, text in self._texts.items()}
        self._escaped = self._verbatim | {34: '\\"', 92: "\\\\"}
        row = asdict(family)
        row |= {key: self._sign(text) for key, text in row.items() if isinstance(text, str)}
        self._form = form = ToolFamily(**row)
        self._ends, self._silent = words(form.parts[2]), form.silent.split()
        headers = [self._sign(text) for text in _HEADERS] if form.plain else []
        spelled = [text for text in form.openers if text not in self._signs.values()]
        openers = [text for text in form.openers if text not in spelled] or spelled
        marks = [*([] if form.at_start else openers), *headers, *self._silent]
        self._headers = [*headers, "to="]
        self._start = openers if form.at_start else ["to="] if headers else []
        self._marks, self._first = _finder(marks), _finder(self._start, r"\s*")
        self._suspect = re.compile("|".join([r"\s\Z", *(re.escape(mark[0]) for mark in marks)]))
        self._key, *self._value, closer = re.split(r"{\w+}", form.parameter or "{}{key}")
        self._key, self._line = self._key.strip(), closer.startswith("\n")
        then = [self._key, *self._ends[:1]] if form.parameter else [*",:}]"]
        closer = closer.strip() or self._sign(_QUOTE)
        self._closer = _finder([closer], r"\n?" if self._line else "", then), then[-1]

        self.n_calls = 0  # complete calls
        self._n_started = 0
        self._buf, self._pos = "", 0
        self._pieces: list[int] = []  # where in _buf the pieces end
        self._raw: list[str] = []  # the text of the present call that has left _buf
        self._raw_from = 0  # and where in _buf it goes on
        self._idle = self._over = self._cut = False  # idle: in content, nothing is held back
        self._out: list[Delta] = []
        self._arguments: list[str] = []
        self._run = self._answer()
        next(self._run)

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[Delta]:
        """Take one piece of the answer and its token ids (needed only if token_ids were given)."""
        if ids and not self._ids.keys().isdisjoint(ids):
            text = self._with_signs(text, ids)
        elif self._idle and text and not self._suspect.search(text):
            return [("content", text)]
        return self._resume(text)

    def finish(self, cut: bool) -> list[Delta]:
        """End of the answer. cut: by the token limit, so that a half call stays half and is not
        shown as text. Otherwise a call of which only end markers are missing is complete, and
        anything else that was held comes back as content."""
        self._over, self._cut = True, cut
        return self._resume("")

    def _resume(self, text: str) -> list[Delta]:
        self._buf += text
        self._pieces.append(len(self._buf))
        self._out = []
        next(self._run, None)
        return self._out

    def _sign(self, text: str) -> str:
        for marker, sign in self._signs.items():
            text = text.replace(marker, sign)
        return text

    def _with_signs(self, text: str, ids: Sequence[int]) -> str:
        """The text with a sign for each marker token, also where a marker has no text in it."""
        done = ""
        for marker in (self._ids[i] for i in ids if i in self._ids):
            before, found, rest = text.partition(marker)
            done += (before if found else "") + self._signs[marker]
            text = rest if found else text
        return done + text

    # -- reading: each waits until it knows --

    def _more(self) -> Steps:
        """Wait for text. Returns by how much positions in `_buf` have moved."""
        if self._over:
            raise _NotACall
        if shift := self._pos:
            self._raw.append(self._buf[self._raw_from : shift])
            self._buf, self._pos, self._raw_from = self._buf[shift:], 0, 0
            self._pieces = [end - shift for end in self._pieces if end > shift]
        yield
        return shift

    def _next(self) -> Steps:
        """Skip whitespace and return the character that is next, "" at the end."""
        while True:
            self._pos = _sure(_SPACE.match(self._buf, self._pos)).end()
            if self._pos < len(self._buf) or self._over:
                return self._buf[self._pos : self._pos + 1]
            yield from self._more()

    def _one_of(self, *texts: str) -> Steps:
        """Skip whitespace and consume one of the texts. None: another text, or the end."""
        while (yield from self._next()):
            rest = self._buf[self._pos : self._pos + _LIMIT]
            for text in filter(rest.startswith, filter(None, texts)):
                self._pos += len(text)
                return text
            if self._over or not any(text.startswith(rest) for text in texts):
                break
            yield from self._more()
        return None

    def _expect(self, *texts: str) -> Steps:
        for text in texts:
            if (yield from self._one_of(text)) is None:
                raise _NotACall

    def _until(self, *texts: str) -> Steps:
        """Consume and return what stands before the first of the texts, which is not consumed."""
        find = _finder(texts)[0]
        while not (match := find.search(self._buf, self._pos, self._pos + _LIMIT)):
            if len(self._buf) - self._pos > _LIMIT:
                raise _NotACall
            yield from self._more()
        start, self._pos = self._pos, match.start()
        return self._buf[start : self._pos].strip()

    def _json(self, sink: Callable[[str], None] = lambda text: None) -> Steps:
        """Consume and return one JSON value, giving its text to `sink` as it comes. Only its end is
        looked for: whether it is JSON, _loads knows when it is complete."""
        scalar = (yield from self._next()) not in ("{", "[", '"')
        depth, quoted, parts = 0, False, [""]
        while True:
            run = _SCALAR if scalar else _STRING if quoted else _PLAIN
            match = _sure(run.match(self._buf, self._pos))
            text, mark, self._pos = match[0], match[1], match.end()
            parts.append(text.translate(self._verbatim) if quoted else text)
            sink(parts[-1])
            if mark:
                quoted ^= mark == '"'
                depth += 0 if quoted else (mark in "{[") - (mark in "}]")
            if scalar and self._pos < len(self._buf) or mark and depth <= 0 and not quoted:
                return "".join(parts)
            if not mark:
                if self._pos < len(self._buf) and not quoted:
                    raise _NotACall
                yield from self._more()

    def _bare(self, sink: Callable[[str], None] = lambda text: None) -> Steps:
        """Consume bare text and its closer. Returns the text; `sink` gets it as it comes."""
        (closed, begun), then = self._closer
        parts = []
        while True:
            whole = self._over and not self._cut
            match = closed.search(self._buf + then if whole else self._buf, self._pos)
            stop = _sure(match or begun.search(self._buf, self._pos)).start()
            start, self._pos = self._pos, stop
            parts.append(self._buf[start : self._pos])
            sink(parts[-1])
            if match:
                self._pos = match.end()
                return "".join(parts).translate(self._texts)
            yield from self._more()

    # -- the answer --

    def _answer(self) -> Steps:
        start, strip = self._start, False
        while (mark := (yield from self._content(start, strip))) is not None:
            start, strip = self._start if mark in self._silent else [], True
            n_started = self._n_started
            try:
                if mark not in self._silent:
                    yield from self._markup(mark)
            except _NotACall:
                shown = not self._cut or (self._form.at_start and n_started == self._n_started)
                text = "".join(self._raw) + self._buf[self._raw_from : self._pos]
                self._give(text if shown else "")
                strip = False

    def _content(self, start: Sequence[str], strip: bool) -> Steps:
        """Give text away up to a marker. Returns the marker, which is consumed, or None at the end.

        start: markers that are good only here. strip: the whitespace here goes with a marker."""
        blank = begun = self._pos  # only whitespace from `blank` to `begun`, then maybe a marker
        while True:
            if strip:
                self._pos = blank = begun = _sure(_SPACE.match(self._buf, self._pos)).end()
                strip = self._pos == len(self._buf)
            match = self._first[0].match(self._buf, self._pos) if start else None
            if start and (self._over or not self._first[1].match(self._buf, self._pos)):
                start = []
            if not match and not start:
                match = self._marks[0].search(self._buf, begun)
                stop = _sure(match or self._marks[1].search(self._buf, begun)).start()
                text = self._buf[begun:stop].rstrip()
                blank, begun = begun + len(text) if text else blank, stop
                whole = bisect_right(self._pieces, blank)  # that many pieces are surely content
                stop = self._pieces[whole - 1] if whole else 0
                stop = blank if match else len(self._buf) if self._over else stop
                for end in self._pieces if stop > self._pos else ():
                    self._give(self._buf[self._pos : min(end, stop)])
                    self._pos = max(self._pos, min(end, stop))
            self._idle = not (start or strip or match) and self._pos == len(self._buf)
            if match:
                self._raw, self._raw_from, self._pos = [], self._pos, match.end()
                return match[1]
            if self._over:
                return None
            shift = yield from self._more()
            blank, begun, self._raw = blank - shift, begun - shift, []

    def _give(self, text: str) -> None:
        if text:
            self._out.append(("content", text.translate(self._texts)))

    def _markup(self, mark: str) -> Steps:
        """What follows a marker: the header of a message, or calls."""
        if mark in self._headers:
            message = self._sign("<|message|>")
            to = re.search(
                r"to=(?:functions\.)?([\w.\-]+)", mark + (yield from self._until(message))
            )
            self._pos += len(message)
            if to and not self._form.openers:
                yield from self._call(to[1])
            return
        if mark == "{":  # a bare object: it begins with its own marker
            self._pos -= 1
        (_, between, close), openers = map(str.strip, self._form.around), self._form.openers
        again, mark = between or list(openers)[-1], mark
        while mark:
            yield from self._expect(*openers.get(mark, []))
            yield from self._call()
            mark = close and (yield from self._one_of(close, again))
            if mark != again:
                return
            self._raw, self._raw_from = [], self._pos

    def _call(self, name: str = "") -> Steps:
        """One call, from its name (if that is not yet known) to its end marker."""
        style, self._arguments = self._form.style, []
        if style != "object":
            name = name or (yield from self._name())
            self._announce(name)
        yield from getattr(self, f"_{style}_style")(self._tools.get(name))
        if not self._arguments:
            self._argument("{}")
        arguments_json("".join(self._arguments))
        self.n_calls += 1
        for end in self._ends[style in ("object", "parameters") :]:
            if (yield from self._one_of(end)) is None:
                break

    def _name(self) -> Steps:
        """The name, and what stands between it and the arguments."""
        after = self._form.parts[0].split("{name}")[-1].strip()
        varying, end = after[: (cut := after.rfind("}") + 1)], after[cut:]
        ends = [end] if end else [self._key, self._ends[0]] if self._form.parameter else ["{"]
        text = yield from self._until(*ends)
        self._pos += len(end)
        varying = re.sub(r"\\{\w+\\}", r"\\w*", re.escape(varying))
        match = re.fullmatch(rf"(.+?)(?:{varying})?", text, re.S)
        return match[1].translate(self._texts) if match else ""

    def _announce(self, name: Any) -> None:
        if (
            not isinstance(name, str)
            or not name
            or (self._form.at_start and name not in self._tools)
        ):
            raise _NotACall
        self._out.append(("call", self._n_started, self._new_id(), name))
        self._n_started += 1

    def _argument(self, text: str) -> None:
        """Give away a fragment of the arguments; all of one piece are one delta."""
        index = self._n_started - 1
        if text:
            self._arguments.append(text)
            if self._out and self._out[-1][:2] == ("arguments", index):
                text = self._out.pop()[2] + text
            self._out.append(("arguments", index, text))

    def _json_style(self, schema: Any) -> Steps:
        if (yield from self._next()) == "{":
            yield from self._json(self._argument)
        elif (yield from self._one_of(*self._ends)) is None and self._buf[self._pos :]:
            self._argument(arguments_json((yield from self._json())))

    def _object_style(self, schema: Any) -> Steps:
        """An object that holds name and arguments, in any order."""
        yield from self._expect("{")
        name, held, word = "", "", ","
        while word == ",":
            key = _loads((yield from self._json()))
            yield from self._expect(":")
            if self._form.at_start and key not in ("name", "id", "type", *_ARGUMENTS):
                raise _NotACall
            if name and key in _ARGUMENTS:
                yield from self._json_style(schema)
            else:
                value = yield from self._json()
                held = value if key in _ARGUMENTS else held
                if key == "name":
                    name = _loads(value)
                    self._announce(name)
                    self._argument(held and arguments_json(held))
            word = yield from self._one_of(",", "}")
        if word is None or not name:
            raise _NotACall

    def _parameters_style(self, schema: Any) -> Steps:
        """Parameters as bare text, typed by the schema. A string is given away as it comes."""
        properties = schema.get("properties") if isinstance(schema, dict) else None
        lead = "{"
        while (word := (yield from self._one_of(self._key, self._ends[0]))) == self._key:
            said = []  # the key, and in some forms whether it is a string
            for part in map(words, self._value):
                said.append((yield from self._until(part[0])))
                yield from self._expect(*part)
            while self._line and self._pos == len(self._buf):
                yield from self._more()
            self._pos += self._line and self._buf[self._pos] == "\n"
            key, *hint = (text.translate(self._texts) for text in said)
            self._argument(f"{lead}{_quoted(key)}: ")
            declared = properties.get(key) if isinstance(properties, dict) else None
            types = {branch.get("type") for branch in schema_branches(declared, schema)}
            types = ({"string"} if hint[0] == "true" else {None}) if hint else types
            if types == {"string"}:
                yield from self._string()
            else:
                self._argument(typed_json((yield from self._bare()), types))
            lead = ", "
        if word is None and (self._cut or not self._over):
            raise _NotACall
        self._argument("{}" if lead == "{" else "}")

    def _string(self) -> Steps:
        self._argument('"')
        yield from self._bare(lambda text: self._argument(text.translate(self._escaped)))
        self._argument('"')

    def _gemma_style(self, schema: Any) -> Steps:
        """Bare keys, strings between quotes, other values as in JSON."""
        depth, texts = 0, [self._sign(_QUOTE), *"{}[],:"]
        while depth or not self._arguments:
            word = yield from self._one_of(*texts)
            if word == texts[0]:
                yield from self._string()
            elif word:
                self._argument(word)
                depth += (word in "{[") - (word in "}]")
            else:
                bare = yield from self._until(*texts)
                key = self._buf[self._pos] == ":"
                self._argument(_quoted(bare) if key else typed_json(bare, {None}))


# ---- Tool calls: the grammar -------------------------------------------------------------------

_REMARKS = {"type", "title", "description", "default", "examples", "$schema", "$defs", "enum"}
_ENFORCED = {
    "string": {"minLength", "maxLength", "pattern"},
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
}
_ANY = "(?s:.*)"


def _regex(text: str) -> str:
    """A regex for llguidance that matches the text. (In its dialect `\\<` has a meaning.)"""
    return "".join(c if c.isalnum() else f"\\u{{{ord(c):x}}}" for c in text)


def _json_rule(schema: Json, root: Json) -> str:
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"%json {json.dumps({**shared, **schema})}"


class _Grammar:
    """Collects the rules of a Lark grammar for llguidance. Methods return expressions.

    The forms that are not JSON are enforced by rules of our own; ValueError for a schema they
    cannot express. Everything that is JSON is left to llguidance."""

    def __init__(self, family: ToolFamily, token_ids: dict[str, int]) -> None:
        self.family, self.tokens = family, token_ids
        self.rules: dict[str, str] = {}  # the text of a rule -> its name

    def rule(self, body: str, kind: str = "r", attributes: str = "") -> str:
        return self.rules.setdefault(f"{attributes}: {body}", f"{kind}{len(self.rules)}")

    def literal(self, text: str) -> str:
        """Markup as it is written, its markers by id where they are tokens."""
        parts = re.split(rf"({_MARKER.pattern}|{{n}}|{{id}})", text)
        known = {"{n}": "/[0-9]+/", "{id}": "/[a-zA-Z0-9]{9}/"}
        known |= {marker: f"<[{token}]>" for marker, token in self.tokens.items()}
        return " ".join(known.get(part) or _quoted(part) for part in parts if part)

    def without(self, texts: Iterable[str], pattern: str = _ANY) -> str:
        """A terminal for text of a pattern without any of the texts, but for those that are tokens:
        a token is never a part of text."""
        spelled = "|".join(_regex(text) for text in texts if text not in self.tokens)
        return self.rule(
            f"/{pattern}/" + (f" & ~/{_ANY}({spelled}){_ANY}/" if spelled else ""), "T"
        )

    def up_to(self, closer: str, pattern: str = _ANY) -> str:
        """Text, and the closer that ends it where it first occurs."""
        text, marker = self.without([closer.strip()], pattern), closer.rstrip()
        if closer.strip() in self.tokens:
            return f"{text} {self.literal(closer)}"
        lazy = self.rule(f"{text} {_quoted(marker)}", attributes="[lazy]")
        return f"{lazy} {self.literal(closer[len(marker) :])}"

    def string(self, branch: Json, closer: str) -> str:
        """A string as bare text, and its closer."""
        if "enum" in branch:
            return f"{_quoted(branch['enum'][0])} {self.literal(closer)}"
        pattern, low, high = (branch.get(k) for k in ("pattern", "minLength", "maxLength"))
        if pattern is None:
            sized = low is not None or high is not None
            size = f"{{{low or 0},{'' if high is None else high}}}" if sized else "*"
            return self.up_to(closer, f"(?s:.{size})")
        if not re.fullmatch(r"\^[^|/]*\$", pattern) or low or high is not None:
            raise ValueError(f"the pattern {pattern!r} cannot be enforced in this form of call")
        return self.up_to(closer, pattern[1:-1])

    def value(self, schema: Any, root: Any, closer: str, head: str = "", depth: int = 0) -> str:
        """A value and its closer in a form that writes strings as they are, after `head` (in which
        {string} tells whether it is one). What has no type is a string."""
        options, gemma = [], self.family.style == "gemma"
        found = schema_branches(schema, root) if depth < 16 else [{"$ref": "recursion"}]
        free = any(b.get("type") == "string" and "enum" not in b for b in found)
        for branch in found:
            kind = branch.get("type", "string")
            ours = kind == "string" or (gemma and kind in _ENFORCED)
            extra = set(branch) - _REMARKS - (_ENFORCED[kind] if ours else set(branch))
            if extra or (free and kind != "string" and (set(branch) - {"type"}) and not gemma):
                what = ", ".join(sorted(extra)) or "a string or something else"
                raise ValueError(f"{what} cannot be enforced in this form of call")
            before = self.literal(head.replace("{string}", "true" if kind == "string" else "false"))
            if gemma and (
                kind == "object" and "properties" not in branch or not branch.get("type")
            ):
                value = self.gemma_any(kind == "object")
            elif kind == "string":
                quote = self.literal(_QUOTE) if gemma else ""
                value = f"{quote} {self.string(branch, _QUOTE if gemma else closer)}"
            elif ours:
                value = self.gemma(kind, branch, root, depth + 1)
            else:
                value = f"{_json_rule(branch, root)} {self.literal(closer)}"
            options.append(f"{before} {value}")
        return self.rule(" | ".join(options))

    def gemma_any(self, only_object: bool) -> str:
        """Any value or any object in Gemma's form."""
        pair = r"/[\w.$\-]{1,64}:/ gemma"
        text = f"{self.literal(_QUOTE)} {self.up_to(_QUOTE)}"
        plain = _json_rule({"type": ["number", "boolean", "null"]}, {})
        self.rules[f': "{{" ({pair} ("," {pair})*)? "}}"'] = "gemma_object"
        array = '"[" (gemma ("," gemma)*)? "]"'
        self.rules[f": {text} | {plain} | {array} | gemma_object"] = "gemma"
        return "gemma_object" if only_object else "gemma"

    def gemma(self, kind: str, schema: Json, root: Any, depth: int) -> str:
        """An object or array in Gemma's form."""
        if kind == "object":
            return f'"{{" {self.members(schema, root, depth)} "}}"'
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        item = self.value(schema.get("items", {}), root, "", "", depth)
        most = "" if high is None else max(high - 1, 0)
        some = f'({item} ("," {item}){{{max(low - 1, 0)},{most}}}){"" if low else "?"}'
        return f'"[" {"" if high == 0 else some} "]"'

    def members(self, schema: Json, root: Any, depth: int = 0) -> str:
        """The properties of an object in the order of their declaration."""
        properties, required = schema.get("properties") or {}, set(schema.get("required") or [])
        form = self.family.parameter or "{key}:{value}"
        comma = "" if self.family.parameter else '","'
        if missing := required - set(properties):
            raise ValueError(f"{min(missing)!r} is required but not among the properties")
        options, rest = [""], ""
        for key, sub in reversed(properties.items()):
            head, closer = form.replace("{key}", key).split("{value}")
            one = self.value(sub, root, closer, head, depth)
            options = [f"{one} {rest}", *([] if key in required else options)]
            more = f"{comma} {one} {rest}"
            rest = self.rule(more if key in required else f"({comma} {one})? {rest}")
        body = " | ".join(filter(None, options))
        return f"({body}){'' if options[-1] else '?'}" if body else ""

    def arguments(self, schema: Json, enforce: bool) -> str:
        """The arguments of one function. Without `enforce`, of JSON only that it is an object, and
        of other forms that its parameters are declared and of the right type."""
        if self.family.style in ("json", "object"):
            return _json_rule({"type": "object", **(schema if enforce else {})}, {})
        if self.family.style == "gemma":
            members = f'"{{" {self.members(schema, schema)} "}}"' if enforce else ""
            return members or self.gemma_any(only_object=True)
        if enforce:
            return self.members(schema, schema)
        options = []
        for key, sub in (schema.get("properties") or {}).items():
            kinds = sorted({b.get("type", "string") for b in schema_branches(sub, schema)})
            head, closer = self.family.parameter.replace("{key}", key).split("{value}")
            options.append(self.value({"type": kinds}, schema, closer, head))
        return f"({' | '.join(options)})*" if options else ""

    def calls(self, bodies: dict[str, str], parallel: bool, skip: int = 0) -> str:
        """All calls of the answer; the first `skip` characters are there already."""
        (opened, between, closed), after = self.family.around, self.literal(self.family.parts[2])
        first, later = (
            self.rule(" | ".join(f"{self.literal(b[n:])} {a} {after}" for b, a in bodies.items()))
            for n in (0 if opened else skip, 0)
        )
        several = parallel and self.family.section.count("{call}") > 1
        more = f"({self.literal(between)} {later})*" if several else ""
        return f"{self.literal(opened[skip:])} {first} {more} {self.literal(closed)}"

    def start(self, calls: Callable[[int], str]) -> str:
        """Free text, or calls; `calls` makes their rule without so many of its characters."""
        family, opener = self.family, next(iter(self.family.openers), "")
        if family.plain:
            text = (
                self.literal(family.plain) + " " + self.without([*_HEADERS, *family.silent.split()])
            )
            return f"({self.literal('<|start|>assistant')})? ({text} | {calls(0)})"
        if family.at_start:
            begin = re.findall(r'[{\[]|"\w+"', family.around[0] + family.parts[0])
            call = r"\s*".join(["", *map(_regex, begin[:2])])
            return f"{self.rule(f'/{_ANY}/ & ~/{call}{_ANY}/', 'T')} | {calls(0)}"
        if opener in self.tokens:
            return f"{self.without([])} (| {calls(0)})"
        text = self.without(family.openers)
        lead = self.rule(f"{text} {_quoted(opener)}", attributes="[lazy]")
        return f"{text} | {lead} {calls(len(opener))}"


def tool_grammar(
    family: ToolFamily,
    tools: list[Json],
    choice: str,
    parallel: bool,
    constraint: str,
    token_ids: dict[str, int],
) -> str | None:
    """A Lark grammar (llguidance) for the answer after the thought; None: nothing to constrain.

    choice: "auto", "required" or a function's name. constraint: "off" (only what choice and strict
    ask for), "format" or "schema". In auto text is free up to a call; after calls the answer ends.
    Raises ValueError for a schema that this form of call cannot enforce; one that llguidance cannot
    enforce fails when the grammar is compiled."""
    functions = [tool["function"] for tool in tools]
    functions = [f for f in functions if choice in ("auto", "required", f["name"])]
    strict = [constraint == "schema" or f.get("strict") is True for f in functions]
    if not functions or (constraint == "off" and choice == "auto" and not any(strict)):
        return None
    grammar, bodies = _Grammar(family, token_ids), {}
    for function, enforce in zip(functions, strict, strict=True):
        shown = _quoted(function["name"])[1:-1] if family.style == "object" else function["name"]
        arguments = grammar.arguments(function.get("parameters") or {}, enforce)
        bodies[family.parts[0].replace("{name}", shown)] = arguments
    if choice == "auto":
        start = grammar.start(lambda skip: grammar.calls(bodies, parallel, skip))
    else:
        opening = f"({grammar.literal('<|start|>assistant')})? " if family.plain else ""
        start = f"(/[ \\n]{{1,2}}/)? {opening}{grammar.calls(bodies, parallel)}"
    rules = [f"{name}{body}" for body, name in grammar.rules.items()]
    return "\n".join(["%llguidance {}", f"start: {start}", *rules])


# ---- Tool calls: in the history ----------------------------------------------------------------


def history_for_template(messages: list[Json], template_text: str) -> list[Json]:
    """Messages as a chat template can show them: no nulls, the arguments of calls as a mapping, or
    as a string where the template adds them to its text as they are. Never raises: arguments that
    are no JSON object are shown as they are, in a mapping under "arguments"."""
    given, uses = r"arguments['\"\])]*\s*", template_text
    as_mapping = re.search(given + r"(?:\||is\b|\.items|or\b|-?%)", uses)
    as_text = not as_mapping and re.search(given + r"(?:\+|~|-?}})", uses)

    def call_id(value: Any) -> Any:
        if "length != 9" not in uses or not isinstance(value, str) or re.fullmatch(r"\w{9}", value):
            return value  # else: Mistral's templates refuse other ids than nine letters or digits
        return hashlib.sha256(value.encode(errors="replace")).hexdigest()[:9]

    def call(value: Any) -> Any:
        function = dict(value.get("function") or {})
        text = function.get("arguments")
        text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        try:
            shown = arguments_json(text)
            function["arguments"] = shown if as_text else json.loads(shown)
        except _NotACall:
            function["arguments"] = text if as_text else {"arguments": text}
        return {**value, "id": call_id(value.get("id")), "function": function}

    adapted = []
    for message in messages:
        message = {key: value for key, value in message.items() if value is not None}
        message["content"] = message.get("content") or ""
        if "tool_call_id" in message:
            message["tool_call_id"] = call_id(message["tool_call_id"])
        if calls := message.pop("tool_calls", None):
            message["tool_calls"] = [call(c) for c in calls]
        adapted.append(message)
    return adapted
