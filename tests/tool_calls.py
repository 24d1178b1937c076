"""Tool calls for every model family: a table of wire forms, one parser, one grammar builder.

Not part of the server yet: the three modules have a budget of code lines, and there is no room for
this part. It stands here, proven by test_tools.py, until there is room for it in exl3_serve.py; a
request with `tools` gets its prompt rendered, and what the model writes comes back as text.
"""

import copy
import hashlib
import json
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from json.encoder import encode_basestring as quoted
from typing import Any

from exl3_serve import Scanner

# ==== Tool calls: the families ====================================================================
#
# A family of models is a row of data: a call as the model writes it, with placeholders for what
# varies: {name}; one of {json}, {object}, {parameters}, {gemma} for the arguments; {n} for digits,
# {id} for nine letters or digits. The parser and the grammar read the same texts. To the parser
# white space between their words is optional, and each line before the name is enough to open a
# call (Qwen3-Coder forgets `<tool_call>`), unless the tokenizer has a token for one of them.
#
# What cannot be read as a call comes back as content, with its markup. A call of a function that
# was not declared is still a call, as in vLLM and as agents expect, who answer it with an error;
# only a call without a marker, a bare object, needs a declared name and must begin the answer: else
# it is plain JSON.

Json = dict[str, Any]
MARKER = re.compile(r'<[|｜]?/?[\w:▁]+[|｜]?>|<\|"\|>|\[[A-Z_]+\]')
WORD = re.compile(
    rf'{MARKER.pattern}|{{\w+}}|"\w+"|<[^\s<>"{{]*>?|[{{}}\[\]",>:]|[^\s<>{{}}\[\]",:]+'
)
QUOTE = '<|"|>'  # around strings in {gemma}
HEADS = ("<|start|>", "<|channel|>", "to=")  # what opens the header of a message
MESSAGE = "<|message|>"  # and what ends it


@dataclass(frozen=True)
class ToolFamily:
    """How one family of models writes tool calls; `--tool-format-file` has the same field names.

    call: {json} is an object; {object} too, inside of an object that holds the name as well;
    {parameters} is a `parameter` for each; {gemma} is `{key:value}`, strings between <|"|>.
    """

    name: str
    call: str
    parameter: str = ""  # with {key} and {value}, perhaps {string}: true or false
    section: str = "{call}{call}"  # all calls of an answer; one {call}: there can be only one
    recognise: str = ""  # lines that are in all its templates, if not simply what opens a call
    silent: str = ""  # markup without a meaning for us, separated by spaces: it vanishes
    plain: str = ""  # if messages have headers: that of text for the user (`call` has its own)

    @staticmethod
    def load(path: str) -> "ToolFamily":
        """Read a row from a JSON file. Raises OSError or ValueError with the reason."""
        with open(path, encoding="utf-8") as file:
            row = dict(json.load(file))
        known = {key: row[key] for key in row.keys() & ToolFamily.__dataclass_fields__.keys()}
        texts = {key: value for key, value in known.items() if isinstance(value, str)}
        family, wrong = ToolFamily(**{"name": path, "call": ""} | texts), row.keys() - texts.keys()
        keyed = re.search("{key}.*{value}", family.parameter, re.S) is not None
        whole = "{name}" in family.call and "{call}" in family.section and len(family.parts) == 3
        whole = whole and keyed == ("{parameters}" in family.call)
        if wrong or not whole or not (family.openers or family.plain):
            raise ValueError(
                f"tool format in {path}: no such field, or no text: {sorted(wrong)}; call needs"
                " something to recognise it by, {name} and one of {json}, {object}, {gemma},"
                " {parameters} (then parameter: {key}, {value}); section needs {call}"
            )
        return family

    @cached_property
    def parts(self) -> list[str]:
        """What stands before the arguments, the style of the arguments, what stands after them."""
        return re.split("{(json|object|parameters|gemma)}", self.call)

    @cached_property
    def around(self) -> tuple[str, str, str]:
        """What stands before all calls, between two and after all."""
        first, *between, last = self.section.split("{call}")
        return first, "".join(between), last

    @cached_property
    def body(self) -> str:
        """A call without its header; an object ends with {object}, which the parser reads whole."""
        body = self.call.rpartition(MESSAGE)[2]
        return re.sub(r'"\s*,\s*"\w+"\s*:\s*{object}\s*}', '"{object}', body)

    @cached_property
    def openers(self) -> dict[str, list[str]]:
        """What opens a call -> all words that follow."""
        first, named, rest = f"{self.around[0]}\n{self.body}".partition("{name}")
        lines = first.split("\n")
        starts = ["\n".join(lines[i:]) for i in range(len(lines) if named else 0)]
        rows = [WORD.findall(start + named + rest) for start in starts if start]
        openers = {row[0]: row[1:] for row in rows if row[0] not in ("{", "{name}")}
        return openers or {row[0]: row[1:] for row in rows[:1] if row[0] == "{"}

    @property
    def markers(self) -> set[str]:
        """The parts of the markup that may be single tokens."""
        texts = [self.call, self.parameter, self.section, self.silent, self.plain]
        texts += [QUOTE] if "{gemma}" in self.call else HEADS if self.plain else []
        return set(MARKER.findall("\n".join(texts)))


def invokes(prefix: str, hint: str = "") -> tuple[str, str]:
    """The call and the parameter of a family that writes <invoke name="f">."""
    return (
        f'<{prefix}invoke name="{{name}}">\n{{parameters}}</{prefix}invoke>',
        f'<{prefix}parameter name="{{key}}"{hint}>{{value}}</{prefix}parameter>\n',
    )


def within(tag: str) -> str:
    return f"<{tag}>\n{{call}}\n{{call}}\n</{tag}>"


OBJECT = '{"name": "{name}", "arguments": {object}}'
DSML = invokes("｜DSML｜", ' string="{string}"')
FAMILIES = (
    ToolFamily(
        "muse",
        " to={name}<|message|><atem:function_calls>\n"
        f"{invokes('atem:')[0]}\n</atem:function_calls>",
        invokes("atem:")[1],
        "{call}<|eom|><|start|>assistant{call}",
        silent="<|eom|> <|eot|>",
        plain=" to=user<|message|>",
    ),
    ToolFamily("minimax_m2", *invokes(""), within("minimax:tool_call")),
    ToolFamily("deepseek_dsml", *DSML, within("｜DSML｜tool_calls"), "｜DSML｜\ntool_calls>"),
    ToolFamily(
        "deepseek_v32", *DSML, within("｜DSML｜function_calls"), "｜DSML｜\nfunction_calls>"
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
    ToolFamily("gemma4", "<|tool_call>call:{name}{gemma}<tool_call|>", silent="<|tool_response>"),
    ToolFamily(
        "glm",
        "<tool_call>{name}\n{parameters}</tool_call>",
        "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        "{call}\n{call}",
    ),
    ToolFamily(
        "qwen3_xml",
        "<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
        "<parameter={key}>\n{value}\n</parameter>\n",
        "{call}\n{call}",
    ),
    ToolFamily(
        "harmony",
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json}<|call|>",
        section="{call}",
        silent="<|end|> <|return|> <|call|>",
        plain="<|channel|>final<|message|>",
        recognise="<|channel|>\n<|call|>",
    ),
    ToolFamily("mistral_v11", "[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{json}"),
    ToolFamily("mistral", "[TOOL_CALLS]{name}[ARGS]{json}"),
    ToolFamily("mistral_list", OBJECT, section="[TOOL_CALLS][{call}, {call}]"),
    ToolFamily("granite", OBJECT, section="<|tool_call|>[{call}, {call}]"),
    ToolFamily(
        "llama3_json",
        '{"name": "{name}", "parameters": {object}}',
        section="{call}",
        silent="<|python_tag|>",
        recognise='{"name": function name, "parameters"',
    ),
    ToolFamily("hermes", f"<tool_call>\n{OBJECT}\n</tool_call>", section="{call}\n{call}"),
    ToolFamily("generic", OBJECT, section='{"tool_calls": [{call}, {call}]}'),
)


def find_family(template_text: str, special_tokens: Iterable[str]) -> ToolFamily:
    """The first family all of whose texts stand in the template; else, in the template or among the
    special tokens; else the generic one, which comes last."""
    for text in (template_text, "\n".join([template_text, *special_tokens])):
        for family in FAMILIES[:-1]:
            marks = [*family.openers, *MARKER.findall(family.parts[0])]
            marks.append(family.parameter.partition("{")[0].strip())
            marks = family.recognise.split("\n") if family.recognise else marks
            if all(mark in text for mark in marks):
                return family
    return FAMILIES[-1]


# ==== Tool calls: arguments and their schemas =====================================================


TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
TYPES |= {dict: "object", type(None): "null"}


class NotACall(Exception):
    """What was begun as a call does not go on as one."""


def strict_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=lambda name: json.loads(f"-{name}"))
    except (ValueError, RecursionError):
        raise NotACall from None


def type_of(value: Any) -> str:
    is_whole = isinstance(value, float) and value.is_integer()
    return "integer" if is_whole else TYPES[type(value)]


def branches(schema: Any, root: Any, depth: int = 0) -> list[Json]:
    """The alternatives of a schema, each with one "type" or none ({}: anything)."""
    if not isinstance(schema, dict) or depth > 16:
        return [{}]
    if isinstance(ref := schema.get("$ref"), str):
        target = root
        for part in ref.split("/")[1:]:
            target = target.get(part) if isinstance(target, dict) else None
        return branches(target, root, depth + 1)
    several = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(several, list):
        return [branch for one in several for branch in branches(one, root, depth + 1)]
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return [{"type": type_of(value), "enum": [value]} for value in values]
    types = schema.get("type")
    return [schema | {"type": t} for t in types] if isinstance(types, list) else [schema]


def typed_json(text: str, types: set[Any]) -> str:
    """The JSON of a value written as bare text. A value that is no JSON of a declared type is kept
    as a string; an integer 007 is 7; what has no declared type is JSON if it parses."""
    bare = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    if types & {"integer", "number"}:
        bare = re.sub(r"^\+?(-?)0*(?=\d)", r"\1", bare)
    try:
        kind = type_of(strict_json(bare))
    except NotACall:
        return quoted(text)
    fits = kind in types or (kind == "integer" and "number" in types)
    return bare if fits or (None in types and kind != "string") else quoted(text)


def arguments_json(text: str) -> str:
    """The arguments of a call: null, "" and nothing are {}, and a string may hold the object.

    Raises NotACall if there is no object in it."""
    value = strict_json(text) if text.strip() else None
    if isinstance(value, str):
        return arguments_json(value)
    if not isinstance(value, dict | None):
        raise NotACall
    return "{}" if value is None else text


# ==== Tool calls: the parser ======================================================================

CONTROLS = {i: quoted(chr(i))[1:-1] for i in range(32)}
IN_STRING = CONTROLS | {34: '\\"', 92: "\\\\"}
OUTSIDE = re.compile(r'["{}\[\]]|[\s\w,:.+\-]+')  # parts of JSON outside of its strings
INSIDE = re.compile(r'\\.|"|[^"\\]+', re.S)
CHUNK = 256  # characters read at once: what is copied for each mark in a text stays short
Steps = Generator[None, None, Any]  # a part of the parser: yields where it needs more text
ToolDelta = tuple[str, str]  # "content", "reasoning" or "arguments" and a text; "call" and a name


class SpacedScanner(Scanner):
    """Also keeps the white space that `glue` left out before the mark found last."""

    space = ""

    def _release(self, keep: float, cut: bool = False) -> Any:
        if cut:
            rest = "".join(text for text, _ in self.held)[int(keep) :]
            self.space = rest[: len(rest) - len(rest.lstrip())]
        return super()._release(keep, cut)


class ToolParser:
    """Tells calls from text: a coroutine over `text`, code that yields where it needs more.

    What `feed` has returned never changes, and joined it does not depend on how the text was cut.
    In content one piece is one delta. The exception NotACall means: what began as a call is none,
    its text becomes content. This also happens to a call that was announced, which then is not
    counted in `n_calls`; and to an object in which the name does not come first.
    """

    def __init__(self, family: ToolFamily, tools: Json, ids: dict[int, str]) -> None:
        """tools: declared names -> JSON schema of the parameters. ids: the `family.markers` that
        are one token; as what begins a call or a header these are known by their ids alone."""
        self.family, self.tools = family, tools
        self.ids = {i: text for i, text in ids.items() if text in family.markers}
        tokens = family.openers.keys() & set(self.ids.values())
        self.openers = {m: w for m, w in family.openers.items() if not tokens or m in tokens}
        self.bare, self.silent = "{" in self.openers, family.silent.split()
        marks = [*(HEADS[:2] if family.plain else ()), *self.silent, *self.openers.keys() - {"{"}]
        starts = HEADS[2:] if family.plain else ["{"] if self.bare else []
        self.scanner = SpacedScanner([*marks, *starts], self.ids, glue=True)
        self.scanner.leading = bool(starts)  # these count at the start only
        self.later = SpacedScanner(marks, self.ids, glue=True)
        self.n_calls = 0  # complete ones
        self.announced = self.over = False
        self.kind = "content"
        self.after_mark = False  # white space that comes now goes with the mark
        self.out: list[ToolDelta] = []
        self.text, self.marker = "", list[int]()  # not yet read; the id if it ends in such a token
        self.raw: list[str] = []  # all text since a call began
        self.arguments: list[str] = []
        self.run = self._answer()
        colon = ":" if "{name}:" in family.call else ""
        self.name = re.compile(rf'[^\s"<>\[\]{{}},{colon}]+')
        head, _, self.closer = family.parameter.partition("{value}")
        newline = r"(?:\n|(?=.))" if head.endswith("\n") else ""
        pattern = r"\s*".join(map(re.escape, head.split("\n"))).removesuffix(r"\s*") + newline
        pattern = re.sub(r"\\{(key|string)\\}", r'(?P<\1>[^<>"]{1,512}?)', pattern)
        self.head = re.compile(rf"\s*{pattern}", re.S)  # what stands before a value
        self.after_value = WORD.findall(head)[:1] + WORD.findall(family.parts[2])[:1]

    def feed(self, text: str, ids: Sequence[int] = ()) -> list[ToolDelta]:
        self.out = []
        for i in filter(self.ids.get, ids):  # each marker for itself, it may be without a text
            before, _, text = text.partition(self.ids[i])
            self._resume(before, [])
            self._resume(self.ids[i], [i])
        self._resume(text, [])
        return self.out

    def finish(self, cut: bool) -> list[ToolDelta]:
        """The end. cut: by the token limit, then a half call stays half and is not shown as text;
        else a call of which only end markers are missing is complete, and what else was held comes
        back as content."""
        self.out, self.over = [], not cut
        if self.over:
            next(self.run)
        elif self.bare and not self.announced:
            self._give(["".join(self.raw)])
        self._give(text for text, _ in self.scanner.finish())
        return self.out

    def _resume(self, text: str, marker: list[int]) -> None:
        for start in range(0, len(text), CHUNK):
            chunk = text[start : start + CHUNK]
            self.raw.append(chunk)
            self.text, self.marker = self.text + chunk, marker
            next(self.run)

    def _answer(self) -> Steps:
        """Content, up to what may open a call."""
        while True:
            if not self.text:
                yield
            leading, self.raw = self.scanner.leading, []
            pieces, mark, self.text = self.scanner.feed(self.text, self.marker)
            texts = [text for text, _ in pieces]
            if texts and leading:  # an answer that begins with text may hold other marks
                self.scanner, self.text = self.later, "".join(texts)
                continue
            self._give(texts)
            self.after_mark = self.after_mark or mark in self.silent
            if not mark or mark in self.silent:
                continue
            self.raw, self.scanner = [self.scanner.space + mark + self.text], self.later
            try:
                yield from self._message(mark) if mark in HEADS else self._calls(mark)
                self.after_mark = True
            except NotACall:
                whole = "".join(self.raw)
                self._give([whole[: len(whole) - len(self.text)]])

    def _give(self, texts: Iterable[str]) -> None:
        for text in texts:
            shown = text.lstrip() if self.after_mark else text
            if shown:
                self.out.append((self.kind, shown))
                self.after_mark = False

    # -- reading: each waits until it knows --

    def _more(self) -> Steps:
        if self.over:
            raise NotACall
        yield

    def _peek(self, *marks: str, may_miss: bool = False) -> Steps:
        """Which of the marks stands behind white space. "": another text, or the end."""
        while True:
            rest = self.text.lstrip()
            if found := next(filter(rest.startswith, marks), ""):
                return found
            if self.over or not any(mark.startswith(rest) for mark in marks):
                if may_miss:
                    return ""
                raise NotACall
            yield from self._more()

    def _next(self, *marks: str, may_miss: bool = False) -> Steps:
        """Likewise, and reads it."""
        mark = yield from self._peek(*marks, may_miss=may_miss)
        if mark:
            self.text = self.text.lstrip()[len(mark) :]
        return mark

    def _name(self) -> Steps:
        """A name, a number or another word, to its end."""
        while True:
            rest = self.text.lstrip()
            match = self.name.match(rest)
            if match and match.end() < len(rest):
                self.text = rest[match.end() :]
                return match[0]
            if rest and not match:
                raise NotACall
            yield from self._more()

    def _until(self, *marks: str, give: Callable[[str], None] | None = None) -> Steps:
        """(text before the first of the marks, the mark); `give` gets the text as it comes."""
        scanner, before = Scanner(marks), []
        while True:
            pieces, mark, self.text = scanner.feed(self.text)
            for text, _ in pieces:
                before.append(text)
                if give:
                    give(text)
            if mark:
                return "".join(before), mark
            yield from self._more()

    # -- calls --

    def _message(self, mark: str) -> Steps:
        """The header of a message, and its call if calls have no mark of their own."""
        header, _ = yield from self._until(MESSAGE)
        to = re.search(r"to=(?:functions\.)?([\w.\-]+)", mark + header)
        thought = "analysis" in header or "to=self" in mark + header
        self.kind = "reasoning" if thought else "content"
        if to and not self.openers:
            yield from self._call(WORD.findall(self.family.body), to[1])

    def _calls(self, mark: str) -> Steps:
        """One call, or all of a list."""
        _, between, close = map(WORD.findall, self.family.around)
        again, words = [*between, *WORD.findall(self.family.body)], self.openers[mark]
        while True:
            yield from self._call(words)
            mark = (yield from self._next(again[0], close[0], may_miss=True)) if close else ""
            if mark != again[0]:
                break
            self.raw, words = [mark + self.text], again[1:]
        for word in close[1:] if mark else ():
            yield from self._next(word, may_miss=True)

    def _call(self, words: Iterable[str], name: str = "") -> Steps:
        """One call. What stands behind its arguments may be missing."""
        read = False
        for word in words:
            if word in ("{name}", "{n}", "{id}"):
                said = yield from self._name()
                name = said if word == "{name}" else name
            elif word[0] == "{" and word != "{":
                yield from self._arguments(word[1:-1], name)
                read = True
            else:
                yield from self._next(word, may_miss=read)

    def _arguments(self, style: str, name: str) -> Steps:
        self.arguments = []
        name = strict_json(f'"{name}"') if style == "object" else name
        if style == "parameters":  # <tool_call> in prose is no call
            yield from self._at_parameter()
        if self.bare and name not in self.tools:
            raise NotACall
        self.out.append(("call", name))
        self.announced = True
        yield from getattr(self, f"_{style}")(self.tools.get(name))
        if not self.arguments:
            self._argument("{}")
        arguments_json("".join(self.arguments))
        self.n_calls += 1

    def _argument(self, text: str) -> None:
        """Gives away a part of the arguments; all of one piece are one delta."""
        if text:
            self.arguments.append(text)
            if self.out and self.out[-1][0] == "arguments":
                text = self.out.pop()[1] + text
            self.out.append(("arguments", text))

    def _in_string(self, text: str) -> None:
        self._argument(text.translate(IN_STRING))

    def _object(self, schema: Any) -> Steps:
        """What follows the name in an object, in which there may be more than the arguments."""
        while (yield from self._next(",", "}")) == ",":
            key: list[str] = []
            yield from self._value(key.append)
            yield from self._next(":")
            if "".join(key) in ('"arguments"', '"parameters"') and not self.arguments:
                yield from self._json(schema)
            else:
                yield from self._value(key.append)

    def _json(self, schema: Any) -> Steps:
        """An object, given away as it comes; or what stands for one."""
        if (yield from self._peek("{", may_miss=True)):
            yield from self._value(self._argument)
        else:
            held: list[str] = []
            yield from self._value(held.append)
            self._argument(arguments_json("".join(held)))

    def _value(self, give: Callable[[str], None]) -> Steps:
        """Any JSON value. Only its end is looked for, and what can be no JSON at all: whether it is
        JSON, strict_json knows later. A raw newline in a string, which JSON forbids, is escaped."""
        mark = yield from self._next(*'{["', may_miss=True)
        give(mark or (yield from self._name()))
        depth, in_string = int(mark in ("{", "[")), mark == '"'
        while depth or in_string:
            while self.text in ("", "\\"):  # half of an escape is no part
                yield from self._more()
            match = (INSIDE if in_string else OUTSIDE).match(self.text)
            if not match:
                raise NotACall
            part, self.text = match[0], self.text[match.end() :]
            give(part.translate(CONTROLS) if in_string else part)
            if part == '"':
                in_string = not in_string
            elif not in_string:
                depth += (part in ("{", "[")) - (part in ("}", "]"))

    def _parameters(self, schema: Any) -> Steps:
        """Parameters as bare text, typed by the schema. A string is given away as it comes."""
        properties = schema.get("properties") if isinstance(schema, dict) else None
        lead = "{"
        while (yield from self._at_parameter()):
            while not (head := self.head.match(self.text)):
                yield from self._more()
            said, self.text = head.groupdict(), self.text[head.end() :]
            self._argument(f"{lead}{quoted(said['key'])}: ")
            declared = properties.get(said["key"]) if isinstance(properties, dict) else None
            types = {branch.get("type") for branch in branches(declared, schema)}
            if "string" in said:
                types = {"string"} if said["string"] == "true" else {None}
            held: list[str] = []
            streams = types == {"string"}
            self._argument('"' if streams else "")
            yield from self._bare(self._in_string if streams else held.append)
            self._argument('"' if streams else typed_json("".join(held), types))
            lead = ", "
        self._argument("{}" if lead == "{" else "}")

    def _at_parameter(self) -> Steps:
        """Whether there is one more parameter; else the end of the call, or of the answer."""
        mark = yield from self._peek(*self.after_value, may_miss=True)
        if not mark and self.text.strip():
            raise NotACall
        return mark == self.after_value[0]

    def _bare(self, give: Callable[[str], None]) -> Steps:
        """Bare text and its closer; a closer behind which neither a parameter nor the end of the
        call follows is text, too."""
        closers = self.closer.strip(), self.closer.rstrip()
        while True:
            _, mark = yield from self._until(*closers, give=give)
            if (yield from self._peek(*self.after_value, may_miss=True)) or not self.text.strip():
                return
            give(mark)

    def _gemma(self, schema: Any) -> Steps:
        """Bare keys, strings between quotes, other values as in JSON."""
        yield from self._next("{")
        self._argument("{")
        depth = 1
        while depth:
            before, mark = yield from self._until(QUOTE, *"{}[],:")
            if before.strip():
                is_key = mark == ":"
                self._argument(quoted(before.strip()) if is_key else typed_json(before, {None}))
            if mark == QUOTE:
                self._argument('"')
                yield from self._until(QUOTE, give=self._in_string)
                self._argument('"')
            else:
                self._argument(mark)
                depth += (mark in "{[") - (mark in "}]")


# ==== Tool calls: the grammar =====================================================================
#
# For llguidance, in its dialect of Lark. The forms that are not JSON are enforced by rules of our
# own, as far as they can express a schema; everything that is JSON is left to llguidance.

# What our own rules enforce, besides what they need not look at
ENFORCED = {"string": {"enum"}, "array": {"items"}, "object": {"properties", "required"}}
PASSIVE = {"type", "title", "description", "default", "examples", "$schema", "$defs"}
PASSIVE |= {"additionalProperties"}  # which they never allow
ANY = "(?s:.*)"


def in_regex(text: str) -> str:
    """A regex for llguidance that matches the text. (In its dialect `\\<` has a meaning.)"""
    return "".join(c if c.isalnum() else f"\\u{{{ord(c):x}}}" for c in text)


def json_rule(schema: Json, root: Json) -> str:
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"%json {json.dumps(shared | schema)}"


class ToolGrammar:
    """Collects the rules of a grammar for what an answer with tools may be. Methods but `text`
    return expressions; ValueError for a schema that our own rules cannot express."""

    def __init__(self, family: ToolFamily, ids: dict[int, str]) -> None:
        self.family, self.gemma = family, "{gemma}" in family.call
        self.tokens = {text: f"<[{i}]>" for i, text in ids.items() if text in family.markers}
        self.rules: dict[str, str] = {}  # the text of a rule -> its name

    def text(self, tools: list[Json], choice: str, parallel: bool, constraint: str) -> str | None:
        """The grammar for the answer after the thought; None: nothing to constrain.

        choice: "auto", "required" or a function's name. constraint: "off" (only what choice and
        strict ask for), "format" or "schema". In auto text is free up to a call; after calls the
        answer ends. Raises ValueError for a schema that this form of call cannot enforce; one that
        llguidance cannot enforce fails when the grammar is compiled."""
        functions = [tool["function"] for tool in tools]
        functions = [f for f in functions if choice in ("auto", "required", f["name"])]
        strict = [constraint == "schema" or f.get("strict") is True for f in functions]
        if not functions or (constraint == "off" and choice == "auto" and not any(strict)):
            return None
        bodies = dict[str, str]()
        for function, enforce in zip(functions, strict, strict=True):
            name = function["name"]
            name = quoted(name)[1:-1] if self.family.parts[1] == "object" else name
            arguments = self.arguments(function.get("parameters") or {}, enforce)
            bodies[self.family.parts[0].replace("{name}", name)] = arguments
        calls = partial(self.calls, bodies, parallel)
        start = self.free_or(calls) if choice == "auto" else f"(/[ \\n]{{1,2}}/)? {calls()}"
        header = f"({self.literal('<|start|>assistant')})?" if self.family.plain else ""
        rules = [f"{name}{body}" for body, name in self.rules.items()]
        return "\n".join(["%llguidance {}", f"start: {header} ({start})", *rules])

    def rule(self, body: str, kind: str = "r", attributes: str = "") -> str:
        return self.rules.setdefault(f"{attributes}: {body}", f"{kind}{len(self.rules)}")

    def literal(self, text: str) -> str:
        """Markup as it is written, its markers by id where they are tokens."""
        parts = re.split(rf"({MARKER.pattern}|{{n}}|{{id}})", text)
        known = self.tokens | {"{n}": "/[0-9]+/", "{id}": "/[a-zA-Z0-9]{9}/"}
        return " ".join(known.get(part) or quoted(part) for part in parts if part)

    def without(self, texts: Iterable[str]) -> str:
        """A terminal for text without any of the texts, but for those that are tokens: a token is
        never a part of text."""
        spelled = "|".join(in_regex(text) for text in texts if text not in self.tokens)
        return self.rule(f"/{ANY}/" + (f" & ~/{ANY}({spelled}){ANY}/" if spelled else ""), "T")

    def up_to(self, closer: str) -> str:
        """Text, and the closer that ends it where it first occurs."""
        text, marker = self.without([closer.strip()]), closer.rstrip()
        if closer.strip() in self.tokens:
            return f"{text} {self.literal(closer)}"
        lazy = self.rule(f"{text} {quoted(marker)}", attributes="[lazy]")
        return f"{lazy} {self.literal(closer[len(marker) :])}"

    def free_or(self, calls: Callable[[int], str]) -> str:
        """Free text, or calls; `calls` makes their rule without so many of its characters."""
        family, opener = self.family, next(iter(self.family.openers), "")
        if family.plain:
            text = self.without([*HEADS[:2], *family.silent.split()])
            return f"{self.literal(family.plain)} {text} | {calls(0)}"
        if opener == "{":
            call = r"\s*".join(["", in_regex("{"), in_regex(family.openers["{"][0])])
            return f"{self.rule(f'/{ANY}/ & ~/{call}{ANY}/', 'T')} | {calls(0)}"
        if opener in self.tokens:
            return f"{self.without([])} (| {calls(0)})"
        text = self.without(family.openers)
        lead = self.rule(f"{text} {quoted(opener)}", attributes="[lazy]")
        return f"{text} | {lead} {calls(len(opener))}"

    def calls(self, bodies: dict[str, str], parallel: bool, skip: int = 0) -> str:
        """All calls of the answer; the first `skip` characters are there already."""
        first, between, last = self.family.around
        after, several = self.literal(self.family.parts[2]), self.family.section.count("{call}") > 1

        def one(lead: str, skip: int) -> str:
            rows = [(self.literal((lead + body)[skip:]), rest) for body, rest in bodies.items()]
            return self.rule(" | ".join(f"{head} {rest} {after}" for head, rest in rows))

        more = f"({self.literal(between)} {one('', 0)})*" if parallel and several else ""
        return f"{one(first, skip)} {more} {self.literal(last)}"

    def arguments(self, schema: Json, enforce: bool) -> str:
        """The arguments of one function. Without `enforce`, of JSON only that it is an object, and
        of other forms that its parameters are declared and of the right type."""
        if self.gemma:
            return self.in_gemma("object", schema if enforce else {}, schema, 0)
        if not self.family.parameter:
            return json_rule({"type": "object"} | (schema if enforce else {}), {})
        if enforce:
            return self.members(schema, schema)
        options = []
        for key, sub in (schema.get("properties") or {}).items():
            kinds = sorted({branch.get("type", "string") for branch in branches(sub, schema)})
            form = self.family.parameter.replace("{key}", key)
            options.append(self.value({"type": kinds}, schema, form))
        return f"({' | '.join(options)})*" if options else ""

    def members(self, schema: Json, root: Any, depth: int = 0) -> str:
        """The properties of an object in the order of their declaration."""
        properties, required = schema.get("properties") or {}, set(schema.get("required") or [])
        if missing := required - set(properties):
            raise ValueError(f"{min(missing)!r} is required but not among the properties")
        first = rest = ""  # what can stand from here on: as the first member, and behind another
        for key, sub in reversed(properties.items()):
            form = (self.family.parameter or "{key}:{value}").replace("{key}", key)
            one = f"{self.value(sub, root, form, depth)} {rest}"
            more = f'"," {one}' if self.gemma else one
            first = self.rule(one if key in required else f"{one} | {first}")
            rest = self.rule(more if key in required else f"{more} | {rest}")
        return first

    def value(self, schema: Any, root: Any, form: str, depth: int = 0) -> str:
        """A value in a form that writes strings as they are; `form` is what stands around it. What
        has no type is a string, or in Gemma's form anything."""
        found, options = branches(schema, root), []
        free = not self.gemma and any(b.get("type") == "string" and "enum" not in b for b in found)
        for branch in found:
            kind = branch.get("type", "any" if self.gemma else "string")
            ours = kind == "string" or (self.gemma and kind in ("any", *ENFORCED))
            extra = branch.keys() - PASSIVE - ENFORCED.get(kind, set()) if ours else set()
            if free and kind != "string" and branch.keys() - PASSIVE:
                extra = {"a string or something else"}
            if extra or depth > 16:
                what = ", ".join(sorted(extra)) or "a schema within itself"
                raise ValueError(f"{what} cannot be enforced in this form of call")
            quote = QUOTE if self.gemma and kind == "string" else ""
            said = form.replace("{string}", "true" if kind == "string" else "false")
            head, closer = said.replace("{value}", f"{quote}{{value}}{quote}").split("{value}")
            if kind == "string" and "enum" not in branch:
                text = self.up_to(closer)
            elif kind == "string":
                text = f"{quoted(branch['enum'][0])} {self.literal(closer)}"
            else:
                text = self.in_gemma(kind, branch, root, depth) if ours else json_rule(branch, root)
                text = f"{text} {self.literal(closer)}"
            options.append(f"{self.literal(head)} {text}")
        return self.rule(" | ".join(options))

    def in_gemma(self, kind: str, schema: Json, root: Any, depth: int) -> str:
        """An object, an array or "any" value in Gemma's form."""
        closed = schema.get("additionalProperties", True) is not True
        if kind == "object" and ("properties" in schema or closed):
            return f'"{{" {self.members(schema, root, depth + 1)} "}}"'
        if kind == "array":
            item = self.value(schema.get("items", {}), root, "{value}", depth + 1)
            return f'"[" ({item} ("," {item})*)? "]"'
        pair, string = r"/[\w.$\-]{1,64}:/ gemma", f"{self.literal(QUOTE)} {self.up_to(QUOTE)}"
        plain = json_rule({"type": ["number", "boolean", "null"]}, {})
        self.rules[f': "{{" ({pair} ("," {pair})*)? "}}"'] = "gemma_object"
        self.rules[f': {string} | {plain} | "[" (gemma ("," gemma)*)? "]" | gemma_object'] = "gemma"
        return "gemma" if kind == "any" else "gemma_object"


# ==== Tool calls: in the history ==================================================================


def history_for_template(messages: list[Json], template_text: str) -> list[Json]:
    """Messages (of check_messages) as a chat template can show them: the arguments of calls as a
    mapping, or as a string where the template adds them to its text as they are. Never raises:
    arguments that are no JSON object are shown as they are, in a mapping under "arguments"."""
    given, uses = r"arguments['\"\])]*\s*", template_text
    as_mapping = re.search(given + r"(?:\||is\b|\.items|or\b|-?%)", uses)
    as_text = not as_mapping and re.search(given + r"(?:\+|~|-?}})", uses)
    adapted = copy.deepcopy(messages)
    calls = [call for message in adapted for call in message.get("tool_calls", [])]
    for call in calls:
        function = call["function"] = call.get("function") or {}
        text = function.get("arguments")
        text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        try:
            shown = arguments_json(text)
            function["arguments"] = shown if as_text else json.loads(shown)
        except NotACall:
            function["arguments"] = text if as_text else {"arguments": text}
    if "length != 9" in uses:  # Mistral's templates refuse ids other than nine letters or digits
        owners = [(m, "tool_call_id") for m in adapted] + [(call, "id") for call in calls]
        for owner, key in owners:
            value = owner.get(key)
            if isinstance(value, str) and not re.fullmatch(r"\w{9}", value):
                owner[key] = hashlib.sha256(value.encode(errors="replace")).hexdigest()[:9]
    return adapted
