"""What goes wrong on a first day: every mistake is one message that says what, where and what to do; exit code 2."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import MistralConfig, MistralForCausalLM
from typer.testing import CliRunner

from made_run import eval_record, made_run, write_log
from teamtr.cli import app
from teamtr.engines.torch.attention import Mixing
from teamtr.engines.torch.loading import TinyShape, tiny_model
from teamtr.engines.torch.tokenizer import character_tokenizer
from teamtr.store import RunFolder

DOCUMENT = Path(__file__).parents[2] / "docs" / "tasks.md"
TEAM = """\
name: first
task: {task}
team:
  model: tiny
  agents:
    - {{name: ann}}
plan: {{stages: 1, problems: 1, group_size: 2}}
"""


def told(*arguments: object, code: int = 2) -> str:
    """What is said on stderr, on one line; there is no traceback."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return " ".join(result.stderr.split())


def team(folder: Path, task: str = "{name: sums}") -> Path:
    file = folder / "team.yaml"
    file.write_text(TEAM.format(task=task), encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a newcomer stands; a page that is served after all ends at once, for the test to fail."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("teamtr.analysis.report.serve.LiveServer.serve_forever", lambda server, **settings: None)


# -- the command line ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", ["", " "])
def test_an_override_without_a_value_is_no_default(empty: str, tmp_path: Path) -> None:
    said = told("check", team(tmp_path), f"plan.radius_nats_per_message={empty}")
    assert "has no value: give one, or null for the default" in said


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("afile/x", "there can be no run folder afile/x: afile is a file"),
        ("afile/x/y", "there can be no run folder afile/x/y: afile is a file"),
        ("/proc/x", "the run folder /proc/x cannot be made"),
    ],
)
def test_a_place_where_no_run_folder_can_be(out: str, message: str, tmp_path: Path) -> None:
    Path("afile").write_text("mine")
    said = told("train", team(tmp_path), "--out", out)
    assert message in said
    assert "saved before" not in said
    assert "teaching" not in said


@pytest.mark.parametrize("command", [["train"], ["report"], ["eval"], ["plan"], ["export", "--merged"], ["swap"]])
def test_a_folder_of_runs_names_them(command: list[str]) -> None:
    """What ``--seeds 3`` wrote is no run, and holds three."""
    for seed in range(3):
        made_run(Path("runs") / "three" / f"seed{seed}")
    more = {"export": ["out"], "swap": ["--agent", "ann", "--with", "tiny", "--out", "out"]}.get(command[0], [])
    said = told(*command, "runs/three", *more)
    assert "runs/three/seed0, runs/three/seed1, runs/three/seed2" in said
    assert "give one of them" in said


def test_a_run_folder_where_a_team_file_is_wanted() -> None:
    made_run(Path("runs") / "first")
    assert "runs/first: is a folder, not a team file: give runs/first/team.yaml" in told("plan", "runs/first")


def test_a_team_file_where_a_run_folder_is_wanted(tmp_path: Path) -> None:
    team(tmp_path)
    assert "team.yaml is a file, not a run folder: for untrained models, give --team team.yaml" in told(
        "eval", "team.yaml"
    )


def test_a_port_in_use_is_named_with_the_remedy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = told("view", tmp_path, "--port", port)
    assert f"port {port} of 127.0.0.1 is in use" in said
    assert "--port 0" in said


def test_a_team_is_not_loaded_for_an_address_that_cannot_be_had(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = told("serve", team(tmp_path), "--port", taken.getsockname()[1])
    assert "is in use: choose another, or --port 0" in said
    assert "teaching" not in said
    said = told("serve", team(tmp_path), "--host", "0.0.0.0", "--port", 0)
    assert "whoever holds the key can use the models" in said
    assert "--allow-remote" in said
    assert "teaching" not in said


def test_a_request_may_not_take_for_ever(tmp_path: Path) -> None:
    said = told("serve", team(tmp_path), "--port", 0, "--request-seconds", "inf")
    assert "Invalid value for '--request-seconds'" in said


@pytest.mark.parametrize("key", ["short", "", "a key with blanks in it", "schlüssel-schlüssel"])
def test_a_key_that_is_none(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAMTR_API_KEY", key)
    said = told("serve", team(tmp_path), "--port", 0)
    assert "TEAMTR_API_KEY must have at least 16 printable ASCII characters" in said
    assert "teaching" not in said


@pytest.mark.parametrize("host", ["999.1.1.1", "1.2.3.4.5", "", "::1"])
@pytest.mark.parametrize("more", [(), ("--allow-remote",)])
def test_a_host_that_is_no_address(host: str, more: tuple[str, ...], tmp_path: Path) -> None:
    said = told("view", tmp_path, "--host", host, *more)
    assert f"--host {host!r} is no IPv4 address" in said
    assert "other machines" not in said


def test_an_address_of_another_machine_cannot_be_listened_on(tmp_path: Path) -> None:
    said = told("view", tmp_path, "--host", "192.0.2.1", "--allow-remote")  # for documentation: nobody's
    assert "--host 192.0.2.1 is no address of this machine" in said


# -- models ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for part in tiny_model(TinyShape(1, 32, 2), seed=0):
        part.save_pretrained(folder)
    return folder


def halve(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])

    return change


def write(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


def remove(*forms: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for file in [file for form in forms for file in folder.glob(form)]:
            file.unlink()

    return change


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (halve("model.safetensors"), r"could not be loaded \(model\.safetensors is damaged: .+\); copy or save"),
        (write("model.safetensors", "abc"), r"could not be loaded \(model\.safetensors is damaged: .+\); copy or save"),
        (halve("config.json"), r"could not be loaded \(config\.json is damaged: .+line \d+"),
        (halve("tokenizer.json"), r"could not be loaded \(tokenizer\.json is damaged: .+line \d+"),
        (halve("tokenizer_config.json"), r"could not be loaded \(tokenizer_config\.json is damaged: .+line \d+"),
        (write("tokenizer.json", "{}"), r"could not be loaded \(KeyError: .+\); give a folder"),
        (write("config.json", "[1]"), r"could not be loaded \(config\.json holds no JSON object\); copy or save"),
        (remove("tokenizer*", "chat*"), r"the folder has no tokenizer \(no tokenizer\.json"),
        (remove("tokenizer.json"), r"the folder has no tokenizer \(no tokenizer\.json"),
        (remove("*"), r"the folder has no config\.json; give a folder saved by transformers"),
    ],
)
def test_a_model_folder_that_is_not_whole(
    change: Callable[[Path], None], message: str, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "torn")
    change(tmp_path / "torn")
    said = told("train", team(tmp_path), "team.model=./torn")
    assert re.search(rf"model '{re.escape(str(tmp_path / 'torn'))}'.* {message}", said), said
    assert "chat template" not in said


# -- data and graders ------------------------------------------------------------------------------------------


def rows(file: Path, *each: dict[str, object]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in each), encoding="utf-8")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.path=nope.jsonl", r"nope\.jsonl: there is no such data file"),
        ("task.path=empty", r"empty: a folder without data files .*; it holds nothing"),
        ("task.grader=python:nofile.py:ok", r"there is no file .*nofile\.py"),
        ("task.grader=python:nofile:ok", r"a Python reward is named python:path/to/file\.py:function"),
        ("task.grader=number", r"d\.jsonl, line 3: grader 'number': no number in the answer 'two'"),
    ],
)
@pytest.mark.parametrize("command", ["train", "check"])
def test_data_that_cannot_be_used(command: str, override: str, message: str, tmp_path: Path) -> None:
    answers = ({"question": f"{k}+1", "answer": "two" if k == 2 else str(k + 1)} for k in range(9))
    rows(tmp_path / "d.jsonl", *answers)
    (tmp_path / "empty").mkdir()
    said = told(command, team(tmp_path, "{name: data, path: d.jsonl, held_out: 0.3}"), override)
    assert re.search(message, said), said


# -- agents ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a" * 300, "must have at most 64 characters (it names a folder), got 300"),
        ("a" * 65, "must have at most 64 characters (it names a folder), got 65"),
        ("Änne", "must be a letter (a-z, A-Z), then letters, digits (0-9), dashes or underscores"),
    ],
)
def test_an_agent_s_name_is_refused_at_its_place(name: str, message: str, tmp_path: Path) -> None:
    file = team(tmp_path)
    file.write_text(file.read_text().replace("ann", name), encoding="utf-8")
    said = told("train", file)
    assert f"{file}:6:14:" in said
    assert message in said


def test_a_run_s_name_is_not_longer_than_a_folder_s(tmp_path: Path) -> None:
    assert "must have at most 200 characters" in told("train", team(tmp_path), f"name={'a' * 201}")


# -- a task of one's own ---------------------------------------------------------------------------------------


@pytest.fixture
def backwards(tmp_path: Path) -> Path:
    """The first class of docs/tasks.md, as a reader would copy it."""
    text = DOCUMENT.read_text(encoding="utf-8").partition("## A benchmark in thirty lines")[2]
    file = tmp_path / "backwards.py"
    file.write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], encoding="utf-8")
    return file


OWN = "{name: 'python:backwards.py:Backwards'}"


def test_an_option_that_the_class_does_not_have(backwards: Path, tmp_path: Path) -> None:
    said = told("train", team(tmp_path, OWN), "task.options={wrods: [a]}")
    assert "backwards.py:Backwards has no option 'wrods'; it has words" in said


def test_an_option_that_the_class_must_have(backwards: Path, tmp_path: Path) -> None:
    text = backwards.read_text()
    backwards.write_text(re.sub(r"(words: Sequence\[str\]) = \(.*?\)\)", r"\1)", text))
    assert "Backwards needs the option 'words': give it in task.options" in told("train", team(tmp_path, OWN))


def test_what_the_class_s_own_code_raises_is_told_as_its_own(backwards: Path, tmp_path: Path) -> None:
    line = 1 + next(k for k, text in enumerate(backwards.read_text().splitlines()) if "return Problem(" in text)
    said = told("train", team(tmp_path, OWN), "task.options={words: [1, 2]}")
    assert "its own code raised TypeError: 'int' object is not subscriptable" in said
    assert f"{backwards}, line {line})" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", "SyntaxError: invalid syntax (FILE, line 1)"),
        ("\nimport no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module' (FILE, line 2)"),
    ],
)
def test_a_file_that_cannot_be_run(text: str, message: str, backwards: Path, tmp_path: Path) -> None:
    backwards.write_text(text)
    said = told("train", team(tmp_path, OWN))
    assert f"its own code raised {message.replace('FILE', str(backwards))}" in said


def test_what_is_named_must_make_a_task(backwards: Path, tmp_path: Path) -> None:
    backwards.write_text("Backwards = 3\n")
    assert "'Backwards' is int, neither a class nor a function" in told("train", team(tmp_path, OWN))


GRADE = ("grade", "python:backwards.py:Backwards", "--responses", "rep.jsonl", "--out", "g.jsonl")


def test_replies_to_an_own_task_s_problems_are_graded_by_id(backwards: Path) -> None:
    replies = [
        {"id": "stone", "response": "It is enots."},
        {"id": "river", "response": "It is river."},
        {"id": "stone", "word": "of no matter", "response": "enots"},  # an id says which problem, as with --data
        {"word": "pebble", "response": "elbbep"},
        {"id": "elsewhere", "word": "pebble", "response": "elbbep"},
    ]
    rows(Path("rep.jsonl"), *replies)
    told(*GRADE, code=0)
    graded = [json.loads(line)["verdict"] for line in Path("g.jsonl").read_text().splitlines()]
    assert graded == ["right", "wrong", "right", "right", "right"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"id": "pebble"},
            "rep.jsonl, line 2: no problem 'pebble' in the problems of backwards, where they are called",
        ),
        ({"wrod": "x"}, "rep.jsonl, line 2: backwards cannot make a problem of this row, which has wrod (KeyError:"),
        ({"word": 7}, "rep.jsonl, line 2: backwards cannot make a problem of this row, which has word (TypeError:"),
    ],
)
def test_a_row_that_an_own_task_cannot_use(row: dict[str, object], message: str, backwards: Path) -> None:
    rows(Path("rep.jsonl"), {"id": "stone", "response": "enots"}, {**row, "response": "x"})
    assert message in told(*GRADE)
    assert not Path("g.jsonl").exists()


def test_a_row_of_data_that_an_own_task_cannot_use(backwards: Path) -> None:
    rows(Path("rep.jsonl"), {"id": "stone", "response": "enots"})
    rows(Path("data.jsonl"), {"id": "stone", "text": "stone"})
    assert "data.jsonl, line 1: backwards cannot make a problem of this row" in told(*GRADE, "--data", "data.jsonl")


# -- comparing -------------------------------------------------------------------------------------------------


def finished(folder: Path, task: str, problems: list[str]) -> Path:
    """A run that solved these held-out problems, all of them."""
    run = made_run(folder, preset="teamtr", agents=("left", "right", "speaker"), batches=())
    team_file = run / "team.yaml"
    team_file.write_text(team_file.read_text().replace("{name: code}", task))
    solved = eval_record(3, 1.0, problem_ids=problems, success_P=[1.0] * len(problems))
    write_log(run, [*RunFolder.read(run).log.read(), solved])
    return run


IDS = [f"h{k}" for k in range(20)]
OTHERS = [f"i{k}" for k in range(20)]


@pytest.mark.parametrize(
    ("tasks", "problems"),
    [
        (("{name: code}", "{name: sums}"), (IDS, IDS)),
        (("{name: data, path: /a.jsonl}", "{name: data, path: /b.jsonl}"), (IDS, OTHERS)),
        (("{name: 'python:/a/x.py:One'}", "{name: 'python:/a/x.py:Two'}"), (IDS, IDS)),
    ],
)
def test_runs_of_different_tasks_have_no_difference(
    tasks: tuple[str, str], problems: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    both = [finished(tmp_path / f"run{k}", tasks[k], problems[k]) for k in range(2)]
    shown = CliRunner().invoke(app, ["compare", *map(str, both)])
    assert shown.exit_code == 0
    _, first, second, *_ = shown.stdout.splitlines()
    assert first.split()[-1] == second.split()[-1] == "%", "the success of each, and nothing after it"
    assert "note: run1 and run0 have different tasks" in shown.stdout
    data = json.loads(CliRunner().invoke(app, ["compare", *map(str, both), "--json"]).stdout)
    assert data["differences"] == []
    assert data["order"] is None


@pytest.mark.parametrize(
    ("tasks", "problems"),
    [
        (("{name: sums}", "{name: sums, digits: 3}"), (IDS, OTHERS)),
        (("{name: data, path: /a.jsonl}", "{name: data, path: /moved/a.jsonl}"), (IDS, IDS)),
        (("{name: 'python:/a/x.py:One'}", "{name: 'python:/moved/x.py:One'}"), (IDS, IDS)),
    ],
)
def test_the_same_task_with_other_settings_or_elsewhere_is_compared(
    tasks: tuple[str, str], problems: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    both = [finished(tmp_path / f"run{k}", tasks[k], problems[k]) for k in range(2)]
    data = json.loads(CliRunner().invoke(app, ["compare", *map(str, both), "--json"]).stdout)
    refused = [note for note in data["notes"] if "no difference is given" in note]
    assert [d["run"] for d in data["differences"]] == ([1] if problems[0] == problems[1] else [])
    assert len(refused) == (problems[0] != problems[1]), "of other problems there is none"
    assert not any("different tasks" in note for note in data["notes"])


# -- models ----------------------------------------------------------------------------------------------------


def test_an_adapter_on_layers_that_are_not_there(tmp_path: Path) -> None:
    said = told("check", team(tmp_path), "team.train=lora", "team.lora.targets=[nonsense]")
    assert said.startswith("error: no adapter on Qwen3ForCausalLM with lora.targets ['nonsense']: Target modules")
    assert said.endswith("Name the layers that carry it in lora.targets, or use train: full")


@pytest.mark.long
def test_a_model_without_an_end_token_could_never_stop(tmp_path: Path) -> None:
    model, tokenizer = tiny_model(TinyShape(layers=1, width=16, heads=2), seed=0)
    tokenizer.eos_token = None
    for holder in (model.config, model.generation_config):
        holder.eos_token_id = None
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    said = told("check", team(tmp_path), "team.model=./model", "team.train=full")
    assert said.startswith("error: neither the model nor its tokenizer declares an end token")


@pytest.mark.long
def test_what_a_model_cannot_be_trusted_with_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning of the library, without the place in the code that gave it, and once for all agents of a model."""

    def mixing(causal_lm: object) -> None:
        raise Mixing("more between its tokens than attention")

    monkeypatch.setattr("teamtr.engines.torch.policy.require_attention_alone", mixing)
    file = team(tmp_path)
    file.write_text(file.read_text().replace("- {name: ann}", "- {name: ann}\n    - {name: bob}"))
    said = told("check", file, "tiny.warmup_steps=0", code=0)
    line = "warning: Qwen3ForCausalLM has more between its tokens than attention: batches are padded instead of packed"
    assert said.count(line) == 1
    assert "policy.py" not in said


@pytest.mark.long
def test_a_window_shorter_than_the_contexts_is_told_once_however_many_agents_have_it(tmp_path: Path) -> None:
    """Contexts of several lengths, two models of one kind: the plain path and padding in one line each."""
    tokenizer = character_tokenizer()
    config = MistralConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, sliding_window=8, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    file = team(tmp_path)
    more = "- {name: ann}\n    - {name: bob, max_tokens: 30}\n    - {name: cat, max_tokens: 60}"
    file.write_text(file.read_text().replace("- {name: ann}", more))
    said = told(
        "train", file, "team.model=./model", "team.train=full", "sampling.engine=paged", "plan.stages=1",
        "learner.precision=fp32", "--out", tmp_path / "out", code=0,
    )  # fmt: skip
    assert said.count("a sliding window of 8 tokens, shorter than its contexts: sampling falls back") == 1
    assert said.count("a sliding window of 8 tokens, shorter than its contexts: batches are padded") == 1


def test_what_makes_learning_unlikely_is_told_before_it_is_tried(tmp_path: Path) -> None:
    rows = [{"question": f"Größe {k}?", "answer": str(k)} for k in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    file = team(tmp_path, "{name: data, path: rows.jsonl, held_out: 0.5}")
    settings = ["plan.problems=8", "tiny.warmup_steps=5", "eval.every=1"]
    result = CliRunner().invoke(app, ["check", str(file), *settings])
    assert result.exit_code == 0, result.output
    for warning in (
        "3 problems to train on, and plan.problems is",
        "3 held-out problems: too few for informative intervals",
        "the built-in tiny model gets no warm-up",
        "3 of 3 problems have characters that the tokenizer does not know",
    ):
        assert result.stdout.count(f"warning: {warning}") == 1


def test_a_tiny_model_that_warmup_teaches_is_not_said_to_get_no_warm_up(tmp_path: Path) -> None:
    rows = [{"question": f"{k} + 1?", "answer": str(k + 1)} for k in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "examples.jsonl").write_text('{"prompt": "2 + 3?", "completion": "5"}\n')
    file = team(tmp_path, "{name: data, path: rows.jsonl, held_out: 0.5}")
    settings = ["warmup.path=examples.jsonl", "warmup.tokens=100"]
    result = CliRunner().invoke(app, ["check", str(file), *settings])
    assert result.exit_code == 0, result.output
    assert "ann is warmed up on 1 example" in result.stdout
    assert "gets no warm-up" not in result.stdout


def test_an_end_token_that_also_stands_for_the_unknown_is_no_unknown_character(tmp_path: Path) -> None:
    model, tokenizer = tiny_model(TinyShape(layers=1, width=16, heads=2), seed=0)
    tokenizer.unk_token = tokenizer.eos_token  # as GPT-2's
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"question": "size 1?", "answer": "1"}\n{"question": "2?", "answer": "2"}\n')
    file = team(tmp_path, "{name: data, path: rows.jsonl, held_out: 0.5}")
    result = CliRunner().invoke(app, ["check", str(file), "team.model=./model"])
    assert result.exit_code == 0, result.output
    assert "tokenizer does not know" not in result.stdout


def test_a_data_file_and_a_column_that_are_not_there_name_what_is(tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text('{"q": "1", "answer": "1"}\n{"q": "2", "answer": "2"}\n')
    said = told("check", team(tmp_path, "{name: data, path: question.jsonl}"))
    assert "question.jsonl: there is no such data file; did you mean 'questions.jsonl'?" in said
    said = told("check", team(tmp_path, "{name: data, path: questions.jsonl}"))
    assert "among the columns ['answer', 'q']: set task.question to one of them" in said
    said = told("check", team(tmp_path, "{name: data, path: questions.jsonl, question: text}"))
    assert "no column 'text'; found ['answer', 'q']: set task.question to one of them" in said


@pytest.mark.long
@pytest.mark.parametrize("command", [["check"], ["plan"], ["train"], ["eval", "--team"], ["sweep"]])
def test_a_mistake_in_a_team_file_is_told_before_torch_is_loaded(command: list[str], tmp_path: Path) -> None:
    """Which takes seconds."""
    (tmp_path / "team.yaml").write_text("name: a\nteem: {}\n")
    lines = ["import sys", "from teamtr.cli import app", "try:", "    app()", "finally:"]
    script = "\n".join([*lines, "    assert 'torch' not in sys.modules, 'loaded'"])
    swept = ["plan.stages=1,2"] if command == ["sweep"] else []
    done = subprocess.run(
        [sys.executable, "-c", script, *command, "team.yaml", *swept],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert 'did you mean "team"' in done.stderr
    assert "loaded" not in done.stderr
