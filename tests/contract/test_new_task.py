"""A new task is one file: dropped into tasks/games, brought by another package, or named by its path."""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from teamtr.config import ConfigError, dump, loads, reference, schema_keys
from teamtr.errors import UserError
from teamtr.session import train as run
from teamtr.session.task import build_task
from teamtr.tasks import Task, TaskConfig, benchmark, games, own_task, registry, task
from teamtr.types import Problem

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "tasks.md"
TEAM = """\
name: small
task: {task}
team: {{model: tabular, max_tokens: 3, agents: [{{name: a}}, {{name: b}}]}}
plan: {{stages: 1, problems: 2, group_size: 4}}
learner: {{epochs: 1, minibatches: 1}}
eval: {{every: 0}}
"""


def team_of(section: str) -> str:
    return TEAM.format(task=section)


def example() -> str:
    """The task of docs/tasks.md."""
    text = DOCUMENT.read_text(encoding="utf-8").partition("## A new task in one file")[2].partition("\n## ")[0]
    [block] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return block


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers, imports and installs is gone afterwards."""
    registry.task_names()
    modules = set(sys.modules)
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    registry._points.cache_clear()
    yield
    registry._points.cache_clear()
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("echoes", "others") or name.startswith("teamtr.tasks.games."):
            del sys.modules[name]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a package of one module with an entry point."""

    def install(package: str, module: str, *, name: str = "echo", value: str | None = None) -> None:
        site = tmp_path / f"site-{package}"
        (site / package).mkdir(parents=True)
        (site / package / "__init__.py").write_text("")
        (site / package / "echo.py").write_text(module, encoding="utf-8")
        info = site / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[teamtr.tasks]\n{name} = {value or f'{package}.echo'}\n")
        monkeypatch.syspath_prepend(str(site))

    return install


@pytest.fixture
def dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file lies in tasks/games."""
    folder = tmp_path / "games"
    folder.mkdir()
    (folder / "echo.py").write_text(example(), encoding="utf-8")
    monkeypatch.setattr(games, "__path__", [*games.__path__, str(folder)])
    importlib.invalidate_caches()


@pytest.fixture(params=["dropped", "installed"])
def echo(request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(request.param)
    if request.param == "installed":
        found("echoes", example())


# -- one file is enough ---------------------------------------------------------------------------------------


def test_the_example_is_short() -> None:
    assert len(example().strip().splitlines()) <= 32


@pytest.mark.long
@pytest.mark.usefixtures("echo")
def test_a_team_file_uses_it_and_trains(tmp_path: Path) -> None:
    team_file = loads(team_of("{name: echo, letters: 3}"))
    assert loads(dump(team_file)) == team_file
    made = build_task(team_file)
    assert made.name == "echo"
    assert len(made.problems("train")) == 7
    kinds = [record["kind"] for record in run.train(team_file, tmp_path / "run")]
    assert kinds[0] == "start"
    assert kinds.count("update") == 2
    assert kinds[-1] == "finished"


@pytest.mark.usefixtures("echo")
def test_its_keys_are_in_the_reference() -> None:
    text = reference()
    assert "### `echo`\n\nSay the word that you were given.\n" in text
    assert "| `task.letters` | whole number >= 1 | `2` | Letters of each word. |" in text
    [key] = [key for key in schema_keys() if key.key == "task.letters"]
    assert key.when == "task.name is echo"
    assert key.exists_for("echo")
    assert not key.exists_for("sums")


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{name: echo, leters: 3}", 'team.yaml:2:20: unknown key "leters" in task; did you mean "letters"?'),
        ("{name: echo, letters: 0}", "team.yaml:2:29: task.letters must be at least 1, got 0"),
        ("{name: ecko}", 'got "ecko"; did you mean "echo"?'),
        ("{name: sums, letters: 3}", 'unknown key "letters" in task; did you mean "terms"?'),
    ],
)
def test_mistakes_are_told_like_those_of_any_task(section: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        loads(team_of(section), "team.yaml")


def test_without_a_name_of_its_own_it_is_called_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "echo.py"
    file.write_text(example(), encoding="utf-8")
    made = build_task(loads(team_of(f"{{name: 'python:{file}:Echo', options: {{letters: 1}}}}")))
    assert [problem.id for problem in made.problems("train")] == ["b"]


# -- other packages -------------------------------------------------------------------------------------------


def test_a_package_is_loaded_when_its_task_is_asked_for(installed: Any) -> None:
    installed("echoes", example())
    loads(team_of("{name: sums}"))
    assert "echo" in registry.task_names()
    assert "echoes.echo" not in sys.modules
    loads(team_of("{name: echo}"))
    assert "echoes.echo" in sys.modules


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("import no_such_package\n", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_package'"),
        ("word = 'no task'\n", '(echoes.echo) is not registered: put @task("echo") on its class there'),
    ],
)
def test_a_broken_package_is_named_when_its_task_is_asked_for(installed: Any, module: str, why: str) -> None:
    installed("echoes", module)
    assert build_task(loads(team_of("{name: sums}"))).name == "sums"
    with pytest.raises(ConfigError, match=r"team\.yaml:2:14: task 'echo' of the package echoes") as told:
        loads(team_of("{name: echo}"), "team.yaml")
    assert why in str(told.value)
    with pytest.raises(ConfigError, match="package echoes") as told:
        loads(team_of("{name: echo}") + "stoer: {}\n")
    assert 'unknown key "stoer" in the team file; did you mean "store"?' in str(told.value)
    with pytest.raises(UserError, match="package echoes"):
        benchmark("echo")
    text = reference()  # others are listed all the same
    assert "### `sums`" in text
    assert "Note: task 'echo' of the package echoes" in text


def test_two_tasks_of_one_name(installed: Any) -> None:
    installed("echoes", example())
    installed("others", example())
    with pytest.raises(ConfigError, match=r"two tasks are called 'echo': \w+\.echo\.Echo and \w+\.echo\.Echo"):
        loads(team_of("{name: echo}"))


@pytest.mark.parametrize("module", [example().replace('"echo"', '"sums"'), "from teamtr.tasks import Sums as Echo\n"])
def test_a_built_in_name_is_taken(installed: Any, module: str) -> None:
    installed("echoes", module, name="sums")
    with pytest.raises(ConfigError, match=r"two tasks are called 'sums': teamtr\.tasks\.games\.sums\.Sums and"):
        loads(team_of("{name: sums}"))


# -- the decorator --------------------------------------------------------------------------------------------


def test_what_cannot_be_registered_is_refused() -> None:
    with pytest.raises(TypeError, match=r'@task\("name"\)'):
        task(Task)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"derive int from teamtr\.tasks\.Task"):
        task("number")(int)  # type: ignore[type-var]

    class Odd(Task):
        class Config:  # type: ignore[assignment]
            pass

        def grade(self, episodes: Any) -> Any:
            return []

    with pytest.raises(TypeError, match=r"Odd\.Config from teamtr\.tasks\.TaskConfig"):
        task("odd")(Odd)


def test_a_task_without_keys_has_a_section_of_its_own() -> None:
    @task("plain")
    class Plain(Task):
        """Nothing to set.

        Nor to explain.
        """

        def grade(self, episodes: Any) -> Any:
            return []

    assert Plain.Config is not TaskConfig
    assert "### `plain`\n\nNothing to set.\n\nIt has no other keys.\n" in reference()


def test_a_section_of_another_task_is_refused() -> None:
    from pydantic import ValidationError

    from teamtr.config import AgentConfig, TeamConfig, TeamFile
    from teamtr.tasks import Roles

    with pytest.raises(ValidationError, match="must be the name of a task"):
        TeamFile(
            name="x",
            task=Roles.Config(name="sums"),
            team=TeamConfig(agents=(AgentConfig(name="a", model="tabular"),)),
        )


# -- a class that is not derived from Task --------------------------------------------------------------------

DUCK = """\
from teamtr.types import Problem, Verdict

class Duck:
    alphabet = "ab"
    def __init__(self):
        self.environment = None
    def problems(self, split):
        return [Problem(id=c, prompt=c, answer=c) for c in "ab"]
    def grade(self, episodes):
        return [Verdict("right" if a == p.answer else "wrong", float(a == p.answer)) for p, a, _ in episodes]

class Slotted:
    __slots__ = ("x",)
    problems = grade = None

class Half:
    def problems(self, split):
        return []

def duck():
    return Duck()
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["Duck", "duck"])
def test_any_class_with_problems_and_a_grader_will_do(name: str, tmp_path: Path) -> None:
    file = tmp_path / "ducks.py"
    file.write_text(DUCK)
    made = own_task(f"python:{file}:{name}")
    assert isinstance(made, Task)
    assert made.alphabet == "ab"
    assert made.environment is None
    assert made.reward_range is None
    assert made.extract(" x ") == " x "
    assert made.failures == {}
    assert made.gold(Problem(id="a", prompt="a")) is None
    team_file = loads(team_of(f"{{name: 'python:{file}:{name}'}}"))
    assert [record["kind"] for record in run.train(team_file, tmp_path / "run")][-1] == "finished"


def test_a_file_is_run_as_it_stands(tmp_path: Path, monkeypatch) -> None:
    """Bytecode of an older text of the same length and second would pass for it."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "ducks.py"
    for alphabet in ("ab", "cd"):
        file.write_text(DUCK.replace('"ab"', f'"{alphabet}"'))
        os.utime(file, (1, 1))
        assert own_task(f"python:{file}:Duck").alphabet == alphabet


@pytest.mark.parametrize(
    ("name", "message"),
    [("Half", "has no 'grade'; derive the class from teamtr.tasks.Task"), ("Slotted", "derive Slotted from")],
)
def test_what_cannot_be_completed_is_explained(name: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "ducks.py"
    file.write_text(DUCK)
    with pytest.raises(UserError, match=re.escape(message)):
        own_task(f"python:{file}:{name}")


# -- no optional attributes -----------------------------------------------------------------------------------


def _looked_up(text: str) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr")]
    return [ast.unparse(call) for call in named if re.search(r"\btask\b", ast.unparse(call.args[0]))]


@pytest.mark.long
def test_nothing_is_looked_up_on_a_task() -> None:
    assert _looked_up('getattr(context.task, "extract", None)') != []
    found = {str(file): _looked_up(file.read_text(encoding="utf-8")) for file in (ROOT / "src").rglob("*.py")}
    assert {file: calls for file, calls in found.items() if calls} == {}
