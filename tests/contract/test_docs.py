"""The documentation: links and anchors resolve, the reference is what the schema says, and every command, option,
file, module, name and key that a page mentions exists."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import layout_page
from teamtr.cli import app
from teamtr.config import reference, schema_keys

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
READ = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
NOW = [page for page in READ if page.name != "log.md"] + [ROOT / "PAPER.md"]
"""Pages that speak of the tree as it is; the log speaks of the past."""
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    """The page without its code: brackets in code are no links, and a comment in it is no heading."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S))


def anchors(path: Path) -> set[str]:
    """Of its headings, as both GitHub and mkdocs make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+\s+(.+)$", text, flags=re.M)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


def broken(path: Path) -> list[str]:
    wrong = []
    for link in _LINK.findall(prose(path)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(f"{path.name}: {link}")
    return wrong


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_every_link_and_anchor_resolves(page: Path) -> None:
    assert broken(page) == []


def test_the_link_check_sees_what_is_broken(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(
        "# A title, twice\n[x](b.md) [y](#a-title-twice) [z](#no) `[code](no.md)`\n```\n[c](no.md)\n# No\n```\n"
    )
    assert broken(page) == ["a.md: b.md", "a.md: #no"]


def test_pages_link_only_to_each_other() -> None:
    """A link out of docs/ works in the repository and breaks on the site."""
    for page in PAGES:
        for link in _LINK.findall(prose(page)):
            assert not link.startswith(".."), (page.name, link)


def test_the_site_lists_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r": ([\w-]+\.md)$", text, flags=re.M)
    assert sorted(listed) == [page.name for page in PAGES]
    assert listed[0] == "index.md"


def test_the_reference_is_what_the_schema_says() -> None:
    stored = (ROOT / "docs" / "team-file.md").read_text()
    assert stored == reference(), "run: teamtr reference --out docs/team-file.md"


def test_the_reference_holds_every_key_with_its_default(tmp_path: Path) -> None:
    text = reference()
    for key in schema_keys():
        (row, *others) = [line for line in text.splitlines() if line.startswith(f"| `{key.key}` |")]
        assert all(len(re.findall(r"(?<!\\)\|", line)) == 5 for line in (row, *others)), "four cells, no stray bar"
        assert any(line.endswith(f"| {key.description.replace('<', '&lt;')} |") for line in (row, *others)), key.key
    assert "| `plan.stages` | whole number >= 1 | `40` | Stages; in each, every agent is updated once. |" in text
    assert "| `name` | text | **required** | Name of the run. |" in text
    written = CliRunner().invoke(app, ["reference", "--out", str(tmp_path / "r.md")])
    assert written.exit_code == 0
    assert (tmp_path / "r.md").read_text() == text


# --- what pages mention exists -----------------------------------------------------------------------------------


def test_commands_and_options_that_pages_name_exist() -> None:
    wrong = [f"{page.name}: {what}" for page in NOW for line in _lines(page) for what in wrong_in_command(line)]
    assert wrong == []


def test_commands_and_options_that_messages_name_exist() -> None:
    """What an error tells a person to type: commands in backquotes, in the texts of the source."""
    files = sorted((ROOT / "src").rglob("*.py"))
    wrong = [f"{f.relative_to(ROOT)}: {what}" for f in files for what in wrong_in_texts(f.read_text(encoding="utf-8"))]
    assert wrong == []


def test_commands_are_found_in_texts_of_several_pieces() -> None:
    source = 'raise E(f"use `teamtr export {run} FOLDER "\n "--merge` and {x}")\n"""`teamtr trian`"""\n'
    assert sorted(wrong_in_texts(source)) == ["teamtr export --merge", "teamtr trian"]


def wrong_in_texts(source: str) -> Iterator[str]:
    for text in told_in(source):
        for command in re.findall(r"`(teamtr [^`]+)`", text):
            yield from wrong_in_command(command)


def told_in(source: str) -> Iterator[str]:
    """The texts of a module, what is put into them left out."""
    inside = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(value) for value in node.values}
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def test_the_command_check_sees_what_is_wrong() -> None:
    assert list(wrong_in_command("teamtr trian team.yaml")) == ["teamtr trian"]
    assert list(wrong_in_command("teamtr lab prove --teams 3")) == ["teamtr lab prove"]
    assert list(wrong_in_command("$ .venv/bin/teamtr demo --seeds 3 --fast  # --slow")) == ["teamtr demo --fast"]
    assert list(wrong_in_command("teamtr compare RUN RUN ... [--format md] [--out F]")) == []
    assert list(wrong_in_command("teamtr train t.yaml plan.stages=1 plan.stagse=2")) == ["teamtr train plan.stagse"]
    assert list(wrong_in_command("python bench/stage.py --parts ours --part x")) == ["bench/stage.py --part"]
    assert list(wrong_in_command("python bench/gone.py --json")) == ["bench/gone.py"]
    assert list(wrong_in_command("make demo && make tea")) == ["make tea"]
    assert list(wrong_in_command("--doublings")) == []
    assert list(wrong_in_command("--halvings")) == ["--halvings"]


def wrong_in_command(line: str) -> Iterator[str]:
    """What a line of code names that is not there: a command, a script, an option, a setting or a target of make."""
    line = line.partition(" #")[0]
    words = re.sub(
        r"(?<!\S)\[|\](?!\S)", " ", line
    ).split()  # [--option VALUE] may be left out; teamtr[hub] is an extra
    if words[:1] and words[0].startswith("--"):
        if words[0].partition("=")[0] not in _every_option():
            yield words[0]
        return
    for target in re.findall(r"\bmake ([a-z][a-z-]*)", line):
        if target not in re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M):
            yield f"make {target}"
    for at, word in enumerate(words):
        after = words[at + 1 :]
        if Path(word).name == "teamtr" and after and re.match("[a-z-]", after[0]) and after[0] != "import":
            yield from _wrong_in_teamtr(after)
        elif word.endswith(".py") and words[max(at - 1, 0)] == "python":
            yield from _wrong_in_script(word, after)


def _wrong_in_teamtr(words: list[str]) -> Iterator[str]:
    command, name = _teamtr(), "teamtr"
    while (inner := _inner(command)) and words and not words[0].startswith("-"):
        name = f"{name} {words[0]}"
        if words[0] not in inner:
            yield name
            return
        command = inner[words.pop(0)]
    for word in words:
        if word.startswith("--") and word.partition("=")[0] not in _options_of(command):
            yield f"{name} {word}"
        elif re.match(r"[a-z_]+\.[\w.]+=", word) and not is_key(word.partition("=")[0]):
            yield f"{name} {word.partition('=')[0]}"


def _wrong_in_script(script: str, words: list[str]) -> Iterator[str]:
    if script in OF_A_READER:
        return
    if not (ROOT / script).is_file():
        yield script
        return
    source = (ROOT / script).read_text()
    yield from (f"{script} {word}" for word in words if word.startswith("--") and f'"{word}"' not in source)


@cache
def _teamtr() -> Any:
    return get_command(app)


def _inner(command: Any) -> dict[str, Any]:
    """The commands of a group; a plain command has none."""
    return getattr(command, "commands", {})


def _options_of(command: Any) -> set[str]:
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return own | {"--help", "--install-completion", "--show-completion"}


@cache
def _every_option() -> frozenset[str]:
    """Of every command and script."""

    def of(command: Any) -> set[str]:
        return _options_of(command).union(*map(of, _inner(command).values()))

    scripts = (file.read_text() for folder in ("bench", "experiments") for file in (ROOT / folder).glob("*.py"))
    return frozenset(of(_teamtr())).union(*(re.findall(r'"(--[a-z-]+)"', text) for text in scripts))


OF_A_READER = {
    *("team.yaml", "TEAM.yaml", "my-team.yaml", "FILE.py", "echo.py", "backwards.py", "moderated.py", "x.py"),
    "file_server.py",
    *("tickets.py", "grade.py", "ask.py", "reward.py", "try_reward.py", "until.py", "runs/desk/report.html"),
    *("team.schema.json", "RUN/trackers/NAME.json", "index.html", "RUN/report.html", "teamtr-demo.html"),
    *("db_TABLE.json", "policy_wiki.md", "tool_schemas.json"),
}
"""Files that commands write, or that a reader writes or has."""


def test_files_that_pages_name_exist() -> None:
    """A path is given from the root, from the package or from the page; a module may go by its last parts."""
    wrong = [f"{page.name}: {name}" for page in NOW for code in _code(page) for name in missing_files(code, page)]
    assert wrong == []


def test_the_file_check_sees_what_is_missing() -> None:
    page = ROOT / "docs" / "figures.md"
    code = "`training/gate.py`, tests/golden/test_math.py::test_x, gate.py, team-file.md, training/glance.py, fused.py"
    assert list(missing_files(code, page)) == ["training/glance.py", "fused.py"]


def missing_files(code: str, page: Path) -> Iterator[str]:
    for name in re.findall(r"(?<![\w./:-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|json|yaml|ipynb|html|toml|css|txt))\b", code):
        places = [ROOT / name, ROOT / "src" / "teamtr" / name, page.parent / name, ROOT / "examples" / name]
        is_module = any(f"/{module}".endswith(f"/{name}") for module in _modules())
        if not is_module and name not in OF_A_READER and not any(place.is_file() for place in places):
            yield name


@cache
def _modules() -> tuple[str, ...]:
    source = ROOT / "src" / "teamtr"
    return tuple(str(file.relative_to(source)) for file in source.rglob("*.py"))


def test_dotted_names_of_the_package_that_pages_name_exist() -> None:
    named = {
        (page.name, name)
        for page in NOW
        for code in _code(page)
        for name in re.findall(r"(?<![\w./@\"-])(teamtr(?:\.\w+)+)(?![\w/.]*\.(?:yaml|html))", code)
    }
    assert len(named) > 50, "the pattern finds nothing"
    assert sorted(f"{page}: {name}" for page, name in named if not _is_there(name)) == []
    assert not _is_there("teamtr.training.gate.glance")
    assert not _is_there("teamtr.gate")


def _is_there(name: str) -> bool:
    module, *rest = name.split(".")
    found = importlib.import_module(module)
    for part in rest:
        module = f"{module}.{part}"
        if not hasattr(found, part):
            try:
                importlib.import_module(module)
            except ImportError:
                return False
        found = getattr(found, part)
    return True


FOREIGN = {
    *("generate", "combo_kernels", "coordinate_descent_tuning", "transformers", "torch", "pip", "base"),
    *("target_modules", "lora_alpha", "sympy", "DIR"),
}
"""Names of other libraries, and placeholders."""


@pytest.mark.long
def test_names_in_code_occur_in_the_tree() -> None:
    """Functions, classes, fields and words of the team file: a page that names one after it was renamed is wrong."""
    known = _words()
    wrong = {
        f"{page.name}: {code}"
        for page in NOW
        for code in _code(page)
        if re.fullmatch(r"[A-Za-z_]\w{2,}", code) and code not in known | FOREIGN
    }
    assert wrong == set()
    assert "run_stage" in known
    assert "GateResults" not in known


@cache
def _words() -> frozenset[str]:
    """Every identifier of the sources: Python, team files, the page's script, build files."""
    files = [file for folder in ("src", "bench", "experiments", "examples") for file in (ROOT / folder).rglob("*.*")]
    files += [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "mkdocs.yml", *(ROOT / "docs").glob("*.json")]
    text = "\n".join(file.read_text() for file in files if file.suffix not in (".pyc", ".typed") and file.is_file())
    return frozenset(re.findall(r"\w+", text))


def test_keys_that_pages_name_exist() -> None:
    """Dotted names in code that begin like a section are keys of the team file."""
    files = (".py", ".md", ".yaml", ".json", ".jsonl")
    for page in NOW:
        for code in _code(page):
            for name in re.findall(r"(?<![\w./:-])((?:[a-z]+)(?:\.[a-zA-Z_]+)+)(?=[:=\s`,)]|$)", code):
                if name.partition(".")[0] in _sections() and not name.endswith(files):
                    assert is_key(name), (page.name, name)


def is_key(name: str) -> bool:
    """A key of the team file, or a section."""
    keys = _keys()
    known = keys | {key.rsplit(".", depth)[0] for key in keys for depth in (1, 2, 3)}
    return re.sub(r"^team\.agents\.\w+", "team.agents.NAME", name) in known


@cache
def _keys() -> frozenset[str]:
    return frozenset(key.key for key in schema_keys())


def _sections() -> set[str]:
    return {key.partition(".")[0] for key in _keys() if "." in key}


def _lines(page: Path) -> Iterator[str]:
    for code in _code(page):
        yield from code.replace("\\\n", " ").splitlines()


def _code(page: Path) -> list[str]:
    text = page.read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S)
    return [*fenced, *re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))]


def test_the_layout_page_lists_every_module_with_its_docstring() -> None:
    assert layout_page.PAGE.read_text() == layout_page.page(), "write it anew: python tests/layout_page.py"


def test_the_demo_s_table_is_told_once() -> None:
    """One table, of one CPU, and that others may differ from it."""
    rows = {}
    for page in (ROOT / "README.md", ROOT / "docs" / "first-steps.md"):
        text = page.read_text()
        rows[page] = re.findall(r"^plan +seed.*\n.*$", text, flags=re.M)
        assert "CPU" in text.split("plan  seed")[0][-300:] + text.split("plan  seed")[1][:700]
    first, second = rows.values()
    assert first == second
    assert len(first) == 1


def test_installation_says_what_is_not_supported_and_how_to_get_a_cpu_build() -> None:
    install, pins = (ROOT / "docs" / "install.md").read_text(), (ROOT / "constraints.txt").read_text()
    assert "Windows is not supported" in install
    assert "--index-url ADDRESS" in install
    assert re.search(r"^torch==[\d.]+$", pins, flags=re.M), "the version, whatever its build"
    assert "docs/install.md" in pins.split("\n\n")[0]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len((ROOT / "SECURITY.md").read_text().splitlines()) <= 100
