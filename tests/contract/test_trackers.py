"""Trackers: the same flat names for all, each tool called as it wants to be, a resumed run in the same place."""

from __future__ import annotations

import importlib.machinery
import json
import math
import sys
import types
from pathlib import Path
from typing import Any, get_args

import pytest

from made_run import eval_record, made_batch, probe_record, update_record
from teamtr.config import ConfigError, loads
from teamtr.config.schema import Tracker
from teamtr.store import batch_name, write_episodes
from teamtr.text import visible
from teamtr.trackers import METRICS, SINKS, Filing, follow, missing, point
from teamtr.types import Episode

TEAM = """\
name: tracked
task: {name: roles}
team:
  model: tabular
  agents: [{name: a1}, {name: a2}]
"""
START = {"kind": "start"}
RESUME = {"kind": "resume"}


# --- flat names ------------------------------------------------------------------------------------------------


def test_an_update_as_flat_numbers_by_hand() -> None:
    probe = {
        "fresh": 0.3,
        "stale": 0.1,
        "gap": {"estimate": 0.2, "lower": 0.1},
        "weights": {"effective_share": 0.5},
        "token_shift": {},
    }
    found = point(update_record(7, 2, 0, "left", exact_success=[None, 0.25], probe=probe, kl_k3=float("nan")))
    assert (found.kind, found.number, found.step, found.seconds) == ("update", 7, 7, 1e9 + 7)
    assert found.values["train/stage"] == 2
    assert found.values["train/exact_success"] == 0.25
    assert found.values["left/kl"] == 0.006
    assert found.values["left/kept"] == 1.0
    assert found.values["left/bound/turn_aware"] == pytest.approx(0.007)
    assert found.values["left/stale_gap"] == 0.2
    assert found.values["left/ess_share"] == 0.5
    assert found.values["left/seconds/train"] == 0.5
    assert "left/kl_k3" not in found.values, "what is not finite is left out"
    assert "left/kl_rejected" not in found.values, "what is null is left out"
    assert not any(name.startswith(("eval/", "stage/")) for name in found.values)


def test_evaluations_and_stages_stand_at_the_updates_done() -> None:
    found = point(eval_record(3, 0.5, updates=9))
    assert (found.number, found.step) == (3, 9)
    assert found.values["eval/success"] == 0.5
    assert found.values["eval/success_low"] == pytest.approx(0.45)
    assert found.values["eval/pass_at/4"] == 0.6
    stage = point({"kind": "stage", "stage": 3, "updates": 12, "accepted": 2, "measured": None, "certificates": []})
    assert (stage.step, stage.values) == (12, {"stage/kept": 2.0})


@pytest.mark.parametrize(
    "record",
    [{}, START, {"kind": "update"}, {"kind": "update", "update": "x"}, {"kind": "newer", "update": 1}, {"kind": []}, 5],
)
def test_other_records_are_no_points(record: Any) -> None:
    assert point(record) is None


DAMAGE = [5, -(10**400), math.nan, "x", "", True, None, [], [5], [[]], {}, {"kind": []}, [{"kind": []}, {"kind": {}}]]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: repr(damage)[:30])
def test_no_field_of_any_kind_of_record_can_make_it_raise(damage: Any) -> None:
    stage = {"kind": "stage", "stage": 3, "updates": 12, "accepted": 2, "measured": 0.1, "certified_of_measured": 0.1}
    whole = update_record(1, 0, 0, "left", probe=probe_record(), exact_success=[0.1, 0.2])
    for record in (whole, eval_record(1, 0.5), stage):
        for key in record:
            found = point({**record, key: damage})
            assert found is None or all(math.isfinite(x) for x in (found.seconds, *found.values.values())), key
            if key not in ("kind", "update", "updates", "stage"):
                assert found is not None, f"a damaged {key} must not lose the rest"


@pytest.mark.parametrize("name", ["stage", "eval", "train"])
def test_an_agent_cannot_take_the_name_of_other_metrics(name: str) -> None:
    stage = {"kind": "stage", "stage": 0, "updates": 3, "accepted": 2, "measured": 0.1, "certified_of_measured": 0.1}
    others = {**point(eval_record(1, 0.5)).values, **point(stage).values}
    found = point(update_record(1, 0, 0, name)).values
    assert found[f"agent.{name}/kept"] == 1.0
    assert found["train/stage"] == 0.0
    assert not others.keys() & found.keys()
    groups = {key.partition("/")[0] for key in found}
    assert groups == {"train", f"agent.{name}"}


def test_damaged_fields_do_not_raise() -> None:
    found = point(update_record(1, 0, 0, "left", certificates=[3, {"kind": "x"}], tokens=4, probe=[], time="noon"))
    assert found is not None
    assert found.seconds > 1e9


def test_names_are_listed_once_and_documented() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    page = (Path(__file__).parents[2] / "docs" / "trackers.md").read_text()
    for metric in METRICS:
        assert f"| `{metric.name}{'…' if metric.name.endswith('/') else ''}` | {metric.meaning} |" in page


# --- the team file ---------------------------------------------------------------------------------------------


def test_the_team_file_names_trackers() -> None:
    assert loads(TEAM).trackers == ()
    assert loads(TEAM + "trackers: [tensorboard, wandb]\n").trackers == ("tensorboard", "wandb")
    assert set(get_args(Tracker)) == set(SINKS)
    with pytest.raises(ConfigError, match=r'6:\d+: trackers.0 must be one of .*, got "wanb"; did you mean "wandb"'):
        loads(TEAM + "trackers: [wanb]\n")
    with pytest.raises(ConfigError, match='trackers names "wandb" twice'):
        loads(TEAM + "trackers: [wandb, wandb]\n")
    with pytest.raises(ConfigError, match="trackers must be a list"):
        loads(TEAM + "trackers: wandb\n")


def test_a_missing_package_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert missing("wandb") == "wandb is not installed: pip install 'teamtr[wandb]'"


# --- each tool, as a fake that writes down how it is called ------------------------------------------------------


class Said(list):
    """Calls in their order; any attribute is a function that is written down and returns what it was given to."""

    def recorder(self, name: str, result: Any = None) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.append((name, args, kwargs))
            return result

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self if called == name]


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def fake_tensorboard(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            said.append(("open", (folder,), {}))

        def __getattr__(self, name: str) -> Any:
            return said.recorder(name)

    fake_module(monkeypatch, "tensorboard")
    fake_module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=SummaryWriter)


def fake_wandb(monkeypatch: pytest.MonkeyPatch, said: Said, *, mode: str = "online", logged_in: bool = True) -> None:
    run = types.SimpleNamespace(id="w-1", log=said.recorder("log"), finish=said.recorder("finish"))
    fake_module(
        monkeypatch,
        "wandb",
        setup=lambda: types.SimpleNamespace(settings=types.SimpleNamespace(mode=mode)),
        login=said.recorder("login", logged_in),
        init=said.recorder("init", run),
        Settings=dict,
        Table=dict,
    )


def fake_mlflow(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    class MlflowClient:
        def __init__(self, uri: str | None) -> None:
            said.append(("open", (uri,), {}))

        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
            said.append(("create_run", (experiment, run_name), {"tags": tags}))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="m-1"))

        def create_experiment(self, name: str, artifact_location: str | None) -> str:
            said.append(("create_experiment", (name, artifact_location), {}))
            return name

        def __getattr__(self, name: str) -> Any:
            return said.recorder(name)

    fake_module(monkeypatch, "mlflow", MlflowClient=MlflowClient)
    fake_module(monkeypatch, "mlflow.entities", Metric=lambda *a: a, Param=lambda *a: a)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def fake_trackio(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    run = types.SimpleNamespace(name="tracked-2", log=said.recorder("log"), finish=said.recorder("finish"))
    fake_module(monkeypatch, "trackio", init=said.recorder("init", run), Table=dict)


FAKES = {"tensorboard": fake_tensorboard, "wandb": fake_wandb, "mlflow": fake_mlflow, "trackio": fake_trackio}


def feed(
    name: str, folder: Path, new: list[dict[str, Any]], log: list[dict[str, Any]], filing: Filing | None = None
) -> list[str]:
    """What ``follow`` said besides the records, which must come through as they are."""
    settings = {"plan": {"stages": 3}, "team": {"agents": [{"name": "a1"}]}, "none": None}
    filed = Filing() if filing is None else filing
    records = follow(iter(new), [name], folder, name="tracked", settings=settings, filing=filed, history=lambda: log)
    out = list(records)
    assert [r for r in out if r["kind"] != "tracker"] == new
    return [r["text"] for r in out if r["kind"] == "tracker"]


@pytest.mark.parametrize("name", FAKES)
def test_every_tracker_gets_the_numbers_and_goes_on_after_a_resume(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(FAKES) == set(SINKS)
    said = Said()
    FAKES[name](monkeypatch, said)
    first, second, third = (update_record(k, 0, k - 1, "left") for k in (1, 2, 3))
    assert feed(name, tmp_path, [START, first, second], [START]) == []
    stored = json.loads((tmp_path / "trackers" / f"{name}.json").read_text())
    assert stored["delivered"] == {"update": 2}
    begun = len(said)
    assert feed(name, tmp_path, [RESUME, third], [START, first, second, RESUME]) == []
    rewards = [update_record(k, 0, 0, "left")["reward"] for k in (1, 2, 3)]
    match name:
        case "tensorboard":
            sent = [(args[2], args[1]) for args, _ in said.of("add_scalar") if args[0] == "train/reward"]
            assert {args for args, _ in said.of("open")} == {(str(tmp_path / "trackers" / "tensorboard"),)}
            assert len(said.of("add_text")) == 1, "settings are written once"
            assert len(said.of("close")) == 2
        case "wandb":
            sent = [(kwargs["step"], args[0]["train/reward"]) for args, kwargs in said.of("log")]
            inits = [kwargs for _, kwargs in said.of("init")]
            assert [(kwargs["id"], kwargs["resume"]) for kwargs in inits] == [(None, "allow"), ("w-1", "allow")]
            assert inits[0]["config"] == {"plan.stages": "3", "team.agents.0.name": "a1"}
            assert inits[0]["settings"]["console"] == "off", "the console belongs to the training screen"
            assert len(said.of("finish")) == 2
        case "mlflow":
            batches = [kwargs["metrics"] for args, kwargs in said.of("log_batch") if "metrics" in kwargs]
            sent = [(m[3], m[1]) for batch in batches for m in batch if m[0] == "train/reward"]
            assert len(said.of("create_run")) == 1
            assert said[begun + 1] == ("update_run", ("m-1",), {"status": "RUNNING"})
            assert said.of("open")[0][0] == (f"sqlite:///{tmp_path.resolve()}/trackers/mlflow.db",)
            assert len(said.of("set_terminated")) == 2
        case "trackio":
            sent = [(kwargs["step"], args[0]["train/reward"]) for args, kwargs in said.of("log")]
            inits = [(kwargs["name"], kwargs["resume"]) for _, kwargs in said.of("init")]
            assert inits == [("tracked", "never"), ("tracked-2", "allow")]
            assert len(said.of("finish")) == 2
    assert sent == list(zip((1, 2, 3), rewards, strict=True)), "each once, in order"


SHOWN = "<b>|x⟨U+001B⟩[2J "
FILED = Filing("mine", "us", "ablation", ("a", "b c"), 3)
STAGE = {"kind": "stage", "stage": 1, "updates": 4, "time": 1e9}


@pytest.mark.parametrize("name", FAKES)
def test_every_tracker_is_told_where_to_file_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said()
    FAKES[name](monkeypatch, said)
    assert feed(name, tmp_path, [START, update_record(1, 0, 0, "left")], [START], FILED) == []
    match name:
        case "wandb":
            [(_, init)] = said.of("init")
            assert [init[key] for key in ("project", "entity", "group", "tags")] == [
                "mine",
                "us",
                "ablation",
                ["a", "b c"],
            ]
        case "mlflow":
            place = (tmp_path.resolve() / "trackers" / "mlflow").as_uri()
            assert said.of("create_experiment") == [(("mine", place), {})]
            tags = {"group": "ablation", "a": "true", "b c": "true"}
            assert said.of("create_run") == [(("mine", "tracked"), {"tags": tags})]
        case "trackio":
            [(_, init)] = said.of("init")
            assert (init["project"], init["group"]) == ("mine", "ablation")


@pytest.mark.parametrize("name", FAKES)
def test_conversations_of_a_stage_are_a_table_where_they_are_asked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the stage's last batch, which has four problems in groups of four: the first episodes of three of them."""
    said = Said()
    FAKES[name](monkeypatch, said)
    (tmp_path / "episodes").mkdir()
    batch = made_batch(("left", "right"), said="<b>|x\x1b[2J ")
    assert visible(batch.problems[0].prompt) == SHOWN
    write_episodes(tmp_path / "episodes" / batch_name(1, 0), made_batch(("left",), seed=9))
    write_episodes(tmp_path / "episodes" / batch_name(1, 1), batch)
    assert feed(name, tmp_path, [START, STAGE], [START], FILED) == []
    rows = [
        [1, SHOWN, _told(first), SHOWN, first.verdict.kind, first.verdict.reward]
        for first in batch.episodes[:12:4]  # questions and answers are what is said, in these made episodes
    ]
    columns = ["stage", "question", "conversation", "answer", "verdict", "reward"]
    match name:
        case "tensorboard":
            [_settings, ((tag, text, step), _)] = said.of("add_text")
            assert (tag, step) == ("conversations", 4)
            assert text.count("\n") == 5, "a heading, a rule and three rows: no text broke out of its cell"
            assert r"\<b\>\|x" in text
        case "mlflow":
            by_column = {name: [row[k] for row in rows] for k, name in enumerate(columns)}
            assert said.of("log_table") == [(("m-1", by_column, "conversations/000004.json"), {})]
        case _:
            tables = [
                (args[0]["conversations"], kw["step"]) for args, kw in said.of("log") if "conversations" in args[0]
            ]
            assert tables == [({"columns": columns, "data": rows}, 4)]
    before = len(said)
    assert feed(name, tmp_path / "none", [START, STAGE], [START]) == []
    assert "'conversations" not in str(list(said[before:])), "none by default"


def _told(episode: Episode) -> str:
    return visible("\n".join(f"{turn.agent}: {turn.text}" for turn in episode.turns))


def test_conversations_that_cannot_be_read_cost_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said()
    fake_wandb(monkeypatch, said)
    (tmp_path / "episodes").mkdir()
    (tmp_path / "episodes" / batch_name(1, 0)).write_bytes(b"not gzip")
    later = {**STAGE, "stage": 2, "updates": 6}
    [told] = feed("wandb", tmp_path, [START, {**STAGE, "kept": 2}, {**later, "kept": 3}], [START], FILED)
    assert told.startswith("tracker wandb gets no conversations of stage 1: ")
    assert [kwargs["step"] for _, kwargs in said.of("log")] == [4, 6]


def test_the_team_file_says_where_to_file_and_what_to_show() -> None:
    tracking = loads(TEAM + "tracking: {project: p, entity: e, group: g, tags: [x], conversations: 2}\n").tracking
    assert Filing(**tracking.model_dump()) == Filing("p", "e", "g", ("x",), 2)
    assert Filing(**loads(TEAM).tracking.model_dump()) == Filing()
    with pytest.raises(ConfigError, match=r"tracking.conversations needs store.episodes"):
        loads(TEAM + "tracking: {conversations: 2}\nstore: {episodes: false}\n")


def test_a_run_that_begins_anew_is_another_run_of_the_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said()
    fake_wandb(monkeypatch, said)
    for _ in range(2):
        feed("wandb", tmp_path, [START, update_record(1, 0, 0, "left")], [START])
    assert [kwargs["id"] for _, kwargs in said.of("init")] == [None, None]


def test_what_a_tracker_missed_is_sent_when_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the whole history, when a tracker is named only now."""
    said = Said()
    fake_wandb(monkeypatch, said)
    log = [START, eval_record(0, 0.1), *(update_record(k, 0, k - 1, "left") for k in (1, 2))]
    feed("wandb", tmp_path, [RESUME, update_record(3, 1, 0, "left")], [*log, RESUME])
    assert [kwargs["step"] for _, kwargs in said.of("log")] == [0, 1, 2, 3]


def test_wandb_without_a_login_is_told_what_to_do_and_never_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Said()
    fake_wandb(monkeypatch, said, logged_in=False)
    told = feed("wandb", tmp_path, [START, update_record(1, 0, 0, "left")], [START])
    assert "run `wandb login`, or set WANDB_MODE=offline" in told[0]
    assert said.of("login") == [((), {"prompt": False})]
    assert said.of("init") == []
    fake_wandb(monkeypatch, said, mode="offline", logged_in=False)
    assert feed("wandb", tmp_path / "offline", [START, update_record(1, 0, 0, "left")], [START]) == []


def test_tensorboard_itself_reads_back_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'teamtr[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first, second = update_record(1, 0, 0, "left"), update_record(2, 0, 1, "right")
    assert feed("tensorboard", tmp_path, [START, first], [START]) == []
    assert feed("tensorboard", tmp_path, [RESUME, second, eval_record(1, 0.5, updates=2)], [START, first]) == []
    events = EventAccumulator(str(tmp_path / "trackers" / "tensorboard"))
    events.Reload()
    assert [(e.step, round(e.value, 6)) for e in events.Scalars("train/reward")] == [(1, 0.201), (2, 0.202)]
    assert [(e.step, e.value) for e in events.Scalars("eval/success")] == [(2, 0.5)]

    (tmp_path / "episodes").mkdir()
    write_episodes(tmp_path / "episodes" / batch_name(1, 0), made_batch(("left", "right")))
    log = [START, first, second, eval_record(1, 0.5, updates=2), RESUME]
    assert feed("tensorboard", tmp_path, [RESUME, STAGE], log, FILED) == []
    events.Reload()
    [shown] = events.Tensors("conversations/text_summary")
    table = shown.tensor_proto.string_val[0].decode()
    assert shown.step == 4
    assert table.splitlines()[0] == "| stage | question | conversation | answer | verdict | reward |"
    assert len(table.splitlines()) == 5
    assert events.Scalars("left/kl")[0].wall_time == first["time"]
