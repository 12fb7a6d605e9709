"""The documentation: links and anchors resolve, the reference is what the schema says, commands and keys exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from teamtr.cli import app
from teamtr.config import reference, schema_keys

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
READ = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
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
    assert "| `name` | text | **required** | Names the run. |" in text
    written = CliRunner().invoke(app, ["reference", "--out", str(tmp_path / "r.md")])
    assert written.exit_code == 0
    assert (tmp_path / "r.md").read_text() == text


def test_commands_that_pages_name_exist() -> None:
    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    for page in PAGES:
        named = set(re.findall(r"(?<!from )\bteamtr ([a-z]+)\b(?! is| holds)", "\n".join(_code(page))))
        assert named <= commands, (page.name, named - commands)


def test_keys_that_pages_name_exist() -> None:
    """Dotted names in code that begin like a section are keys of the team file."""
    keys = {key.key for key in schema_keys()}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    known = keys | {key.rsplit(".", depth)[0] for key in keys for depth in (1, 2, 3)}
    for page in PAGES:
        for code in _code(page):
            for name in re.findall(r"(?<![\w./:-])((?:[a-z]+)(?:\.[a-zA-Z_]+)+)(?=[:=\s`,)]|$)", code):
                if name.partition(".")[0] in sections and not name.endswith((".py", ".md", ".yaml", ".json", ".jsonl")):
                    generic = re.sub(r"^team\.agents\.\w+", "team.agents.NAME", name)
                    assert generic in known, (page.name, name)


def _code(page: Path) -> list[str]:
    text = page.read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S)
    return [*fenced, *re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))]


def test_the_layout_page_lists_every_module() -> None:
    source = ROOT / "src" / "teamtr"
    modules = {
        str(file.relative_to(source))
        for file in source.rglob("*.py")
        if file.name not in ("__init__.py", "__main__.py")
    }
    listed = set(re.findall(r"^\| `([\w/]+\.py)` \|", (ROOT / "docs" / "layout.md").read_text(), flags=re.M))
    assert listed == modules


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len((ROOT / "SECURITY.md").read_text().splitlines()) <= 100
