"""The rules of this repository that a program can check: layout, imports, size, style, README.

The budget is there to force a simple shape. When it does not hold, look for what can be simpler
before asking for room.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import exl3_serve

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("exl3_serve.py", "engine.py", "http11.py")
MAX_CODE_LINES = 2400
MAX_HTTP11_LINES = 320
MAX_FUNCTION_LINES = 50
MAX_LINE_LENGTH = 100

TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", "tests", *MODULES}

# module -> (packages it may import at its top, packages only inside functions), besides the stdlib
MAY_IMPORT = {
    "http11.py": ({"h11"}, set()),
    "engine.py": (set(), {"torch", "exllamav3", "tokenizers", "llguidance"}),
    "exl3_serve.py": ({"engine", "http11"}, {"jinja2", "yaml"}),
}
SLOW_PACKAGES = (
    "torch",
    "exllamav3",
    "jinja2",
    "yaml",
    "numpy",
    "llguidance",
    "tokenizers",
    "transformers",
)


def tracked_files():
    """Files that git has or would take; those it ignores are nobody's business, and so is a virtual
    environment in the clone, whatever it is called."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    environments = tuple(f"{cfg.parent.name}/" for cfg in ROOT.glob("*/pyvenv.cfg"))
    paths = [path for path in done.stdout.splitlines() if not path.startswith(environments)]
    return [path for path in paths if (ROOT / path).exists()]


def source(name):
    return (ROOT / name).read_text(encoding="utf-8")


def docstring_lines(tree):
    """The lines of every docstring."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None:
            lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def code_lines(text):
    """Numbers of the lines that hold code: no blanks, comments and docstrings."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout | {tokenize.ENDMARKER}:
            lines |= set(range(token.start[0], token.end[0] + 1))
    blank = {number for number, line in enumerate(text.splitlines(), 1) if not line.strip()}
    return lines - blank - docstring_lines(ast.parse(text))


def functions(tree):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def imported(nodes):
    """Top-level package names imported by these nodes."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names - set(sys.stdlib_module_names)


# ==== Counting counts =============================================================================


def test_code_lines_are_counted_without_blanks_comments_and_docstrings():
    text = '"""Doc\n\nstring."""\n\n# comment\nx = 1  # one\n\n\ndef f():\n    """Doc."""\n'
    text += '    return (\n        """text\n\nmore"""\n    )\n'
    assert code_lines(text) == {6, 9, 11, 12, 14, 15}


# ==== Layout ======================================================================================


def test_the_top_level_holds_three_modules_and_nothing_unexpected():
    found = {path.partition("/")[0] for path in tracked_files()}
    assert {name for name in found if not name.startswith(".")} - TOP_LEVEL == set()


def test_no_tracked_file_names_a_place_on_one_machine():
    pattern = re.compile(r"/(?:work|root|home/\w+)/|/tmp/w\b|\.\./shared")
    for path in tracked_files():
        try:
            text = source(path)
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            allowed = path == "tests/test_house_rules.py" and "re.compile" in line
            assert allowed or not pattern.search(line), f"{path}:{number}: {line.strip()[:80]}"


# ==== Imports =====================================================================================


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_what_its_row_in_the_design_allows(name):
    tree = ast.parse(source(name))
    inside = {node for function in functions(tree) for node in ast.walk(function)}
    top, in_functions = MAY_IMPORT[name]
    assert imported(set(ast.walk(tree)) - inside) <= top
    assert imported(inside) <= top | in_functions


def run_python(code, *options):
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


SLOW_ONES_LOADED = f"[name for name in {SLOW_PACKAGES} if name in sys.modules]"


@pytest.mark.parametrize("name", MODULES)
def test_importing_a_module_loads_nothing_slow(name):
    code = f"import sys, {name.removesuffix('.py')}; print({SLOW_ONES_LOADED})"
    assert run_python(code).strip() == "[]"


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_asking_for_help_or_version_loads_nothing_slow(flag):
    code = (
        "import sys, exl3_serve\n"
        f"try:\n    exl3_serve.main(['{flag}'])\n"
        f"except SystemExit as end:\n    print(end.code, {SLOW_ONES_LOADED})"
    )
    assert run_python(code).splitlines()[-1] == "0 []"


def test_with_h11_alone_installed_the_fake_engine_can_be_served(tmp_path):
    """A Python without site-packages, given h11 and the checkout: all that --fake needs."""
    import h11

    (tmp_path / "h11").symlink_to(Path(h11.__file__).parent)
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]\n"
        "import engine, exl3_serve\n"
        "args = exl3_serve.make_parser().parse_args(['--fake', '-cs', '512'])\n"
        "backend = engine.load(args, 2, [], lambda n, of: None)\n"
        "model = exl3_serve.Model(backend, args)\n"
        "print(model.info.n_ctx, model.render([{'role': 'user', 'content': 'x'}], None, {})[:14])"
    )
    assert run_python(code, "-I", "-S").strip() == "512 <|im_start|>us"


# ==== Size and style ==============================================================================


def test_the_three_modules_keep_within_their_budget():
    sizes = {name: len(code_lines(source(name))) for name in MODULES}
    assert sum(sizes.values()) <= MAX_CODE_LINES, sizes
    assert sizes["http11.py"] <= MAX_HTTP11_LINES, sizes


@pytest.mark.parametrize("name", MODULES)
def test_no_function_is_long(name):
    text = source(name)
    lines = code_lines(text)
    for node in functions(ast.parse(text)):
        n = sum(node.lineno <= number <= node.end_lineno for number in lines)
        assert n <= MAX_FUNCTION_LINES, f"{name}: {node.name} has {n} code lines"


def test_no_line_is_long():
    for path in tracked_files():
        if path.endswith(".py"):
            for number, line in enumerate(source(path).splitlines(), 1):
                assert len(line) <= MAX_LINE_LENGTH, f"{path}:{number}"


@pytest.mark.parametrize("command", [["format", "--check"], ["check"]], ids=" ".join)
def test_ruff_has_nothing_to_say(command):
    pytest.importorskip("ruff")
    paths = [path for path in tracked_files() if path.endswith(".py")]
    command = [sys.executable, "-m", "ruff", *command, "--quiet", "--no-cache", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", MODULES)
def test_every_module_opens_with_an_essay(name):
    essay = ast.get_docstring(ast.parse(source(name))) or ""
    assert len(essay.splitlines()) >= 20
    assert "reading order" in essay.lower()


# ==== README ======================================================================================


def mentioned(word):
    """Whether the README has this word, not only as a part of a longer one."""
    return re.search(rf"(?<![\w/-]){re.escape(word)}(?![\w/-])", source("README.md")) is not None


def test_every_route_is_in_the_readme():
    assert [route for route in exl3_serve.ROUTES if not mentioned(route)] == []


def test_every_option_is_in_the_readme():
    flags = [flag for row in exl3_serve.OPTIONS for flag in row[0].split()]
    assert [flag for flag in flags if not mentioned(flag)] == []
