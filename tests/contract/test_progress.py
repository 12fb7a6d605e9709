"""Never a blank screen: what is told of work that takes long, by a clock that the tests turn."""

from __future__ import annotations

import io
import sys
import time

import pytest
from rich.console import Console

from made_run import update_record
from taught import teaching_for_real
from teamtr.cli import works as works_module
from teamtr.cli.common import errors
from teamtr.cli.progress import TrainingScreen
from teamtr.cli.works import LINE_EVERY, SHOWN_AFTER, Works, described
from teamtr.config import loads
from teamtr.engines.torch.loading import TinyShape, tiny_model
from teamtr.engines.torch.pretrained import load_pretrained
from teamtr.errors import UserError
from teamtr.progress import Work, listening, working
from teamtr.session import models
from teamtr.session.build import build
from teamtr.session.success import evaluate_team
from teamtr.session.train import train


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Heard:
    """Every piece of work that began, as it was when it ended."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.open: list[Work] = []

    def begin(self, work: Work) -> None:
        self.open.append(work)

    def end(self, work: Work) -> None:
        assert self.open.pop() is work, "what began last ends first"
        self.works.append(work)

    def named(self, what: str) -> list[Work]:
        return [work for work in self.works if work.what == what]


@pytest.fixture
def told() -> list[str]:
    return []


def test_nothing_is_said_of_what_is_quick(told):
    clock = Clock()
    works = Works(now=clock, tell=told.append)
    with listening(works), working("saving"):
        clock.now += SHOWN_AFTER - 0.1
        works.tick()
        assert works.line() is None
    assert told == []


def test_plain_lines_come_after_two_seconds_and_every_five(told):
    clock = Clock()
    works = Works(now=clock, tell=told.append)
    with listening(works), working("teaching", 100, "steps") as work:
        for _ in range(100):  # a step takes a fifth of a second
            clock.now += 0.2
            work.advance()
            works.tick()
    assert told == [
        "teaching: 10 of 100 steps, 5/s, 0:18 left at most",
        "teaching: 35 of 100 steps, 5/s, 0:13 left at most",
        "teaching: 60 of 100 steps, 5/s, 0:08 left at most",
        "teaching: 85 of 100 steps, 5/s, 0:03 left at most",
        "teaching: done in 0:20",
    ]
    assert (SHOWN_AFTER, LINE_EVERY) == (2.0, 5.0)


def test_work_that_counts_nothing_shows_too(told):
    clock = Clock()
    works = Works(now=clock, tell=told.append)
    with listening(works), working("compiling"):
        clock.now += 61
        works.tick()
    assert told == ["compiling: 1:01 so far", "compiling: done in 1:01"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_work_that_is_broken_off_is_not_said_to_be_done(told, error):
    clock = Clock()
    works = Works(now=clock, tell=told.append)

    def break_off() -> None:
        with listening(works), working("loading"):
            clock.now += 3
            works.tick()
            raise error

    with pytest.raises(error):
        break_off()
    assert told == ["loading: 0:03 so far"]
    assert works.line() is None


def test_the_innermost_long_work_is_shown_with_what_it_is_part_of(told):
    clock = Clock()
    works = Works(now=clock, tell=told.append)
    with listening(works), working("evaluating"):
        clock.now += 3
        with working("sampling left"), working("tokens", 400, "tokens") as work:
            assert works.line() == "evaluating: 0:03 so far", "what is inside has just begun"
            clock.now += 2
            work.advance(100)
            assert works.line() == "evaluating, sampling left, tokens: 100 of 400 tokens, 50/s, 0:06 left at most"
    assert works.line() is None
    assert told == [], "no plain line was due, so no end is told"


def test_work_whose_outer_work_ended_first_is_forgotten(told):
    works = Works(now=Clock(), tell=told.append)
    outer, inner = Work("outer"), Work("inner")
    works.begin(outer)
    works.begin(inner)
    works.end(outer)
    works.end(inner)
    assert works.line() is None


@pytest.mark.parametrize(
    ("work", "seconds", "text"),
    [
        (Work("x", None, "tokens", 5000), 2.0, "5,000 tokens, 2,500/s"),
        (Work("x", 10, "steps", 0), 7.0, "0 of 10 steps, 0:07 so far"),
        (Work("x", 10, "steps", 12), 4.0, "12 of 10 steps, 3/s, 0:00 left at most"),
    ],
)
def test_how_far_it_is_in_words(work, seconds, text):
    assert described(work, seconds) == text


def test_python_is_silent_and_a_listener_hears_its_own_block_alone(capsys):
    heard = Heard()
    with working("before"):
        pass
    with listening(heard), pytest.raises(ValueError), working("within"):
        raise ValueError
    with working("after"):
        pass
    assert [work.what for work in heard.works] == ["within"], "also when it fails"
    assert capsys.readouterr() == ("", "")


def test_a_terminal_is_given_a_line_without_control_codes(told):
    clock = Clock()
    works = Works(now=clock, tell=told.append)
    works.begin(Work("loading \x1b[31mred"))
    clock.now += 3
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    console.print(works)
    assert "\x1b[31mred" not in console.file.getvalue()
    assert "red: 0:03 so far" in console.file.getvalue()


def test_commands_show_it_without_a_terminal(monkeypatch):
    """Through the thread that looks: the test waits for the line, however long that takes on a busy machine."""
    monkeypatch.setattr(works_module, "SHOWN_AFTER", 0.0)
    monkeypatch.setattr(works_module, "LOOK_EVERY", 0.01)
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with errors(), working("waiting", 7, "lines"):
        for _ in range(6000):
            if "waiting: 0 of 7 lines" in screen.getvalue():
                break
            time.sleep(0.01)
    first, *_, last = screen.getvalue().splitlines()
    assert first.startswith("waiting: 0 of 7 lines, ")
    assert last.startswith("waiting: done in ")
    before = screen.getvalue()
    with working("afterwards"):
        time.sleep(0.05)
    assert screen.getvalue() == before, "the command is over"


def test_a_training_screen_has_the_line_under_its_table(told):
    clock = Clock()
    works = Works(now=clock, tell=told.append)
    works.begin(Work("sampling left"))
    clock.now += 3
    screen = TrainingScreen(works=works)
    screen.console = Console(file=io.StringIO(), force_terminal=True, width=200)
    with screen:
        assert works.is_hosted, "so that there are not two live screens"
        list(screen.watch([update_record(1, 0, 0, "left")]))
        screen.live.refresh()
        shown = screen.console.file.getvalue()
    assert not works.is_hosted
    assert shown.index("KL/radius") < shown.rindex("sampling left: 0:03 so far")


@pytest.mark.parametrize("bound", [float("inf"), float("nan"), 0.02, 0.0])
def test_a_training_screen_bears_a_bound_that_is_no_number_and_memory_that_is_not_known(bound):
    screen = TrainingScreen()
    screen.console = Console(file=io.StringIO(), force_terminal=True, width=200)
    stage = {"kind": "stage", "memory": {"planned_gb": 1.0, "peak_gb": None}}
    with screen:
        list(screen.watch([update_record(1, 0, 0, "left", kl_upper=bound, radius=0.01), stage]))
        screen.live.refresh()
    assert ("█" * 12 if bound else "·" * 12) in screen.console.file.getvalue()


# -- what is told ---------------------------------------------------------------------------------------------

TEAM = """
name: small
task: {name: code, symbols: AB, held_out: 0.5, skill: 0.8}
tiny: {layers: 1, width: 32, heads: 2, warmup_steps: 6, warmup_learning_rate: 1e-2}
team:
  model: tiny
  agents:
    - {name: left, max_tokens: 2}
    - {name: right, max_tokens: 2}
    - {name: speaker, max_tokens: 3}
plan: {preset: teamtr, stages: 1, problems: 2, group_size: 8, radius_nats_per_message: 0.05}
learner: {minibatches: 2, epochs: 1, micro_batch: 4, cross_fit: false, gate_share: 1.0, certify_share: 0}
eval: {every: 1, samples: 4}
"""


@pytest.mark.long
def test_every_phase_of_a_run_is_told_with_its_count(tmp_path):
    heard = Heard()
    with teaching_for_real(), listening(heard):
        records = list(train(loads(TEAM, "team"), tmp_path / "run"))
    outcomes = [r["outcome"] for r in records if r["kind"] == "update"]
    assert heard.open == []
    (taught,) = heard.named("teaching the tiny base")
    assert (taught.done, taught.total, taught.unit) == (6, 6, "steps")
    names = ("left", "right", "speaker")
    told = {work.what for work in heard.works}
    assert told >= {"loading models", "testing the grader", "rehearsing memory", "saving", "evaluating", "grading"}
    assert told >= {f"sampling {name}" for name in names}
    assert told >= {f"noise floor of {name} in fp32" for name in names}
    assert "accepted" in outcomes, "else nothing was trained"
    assert any(what.startswith("scoring ") for what in told)
    assert any(what.startswith("training ") for what in told)
    assert any(what.startswith("gate of ") for what in told)
    counted = [work for work in heard.works if work.unit == "micro-batches"]
    assert {work.what for work in counted} >= {"gradients", "passes of left"}
    assert all(work.done == work.total for work in counted)
    steps = heard.named("steps")
    assert steps
    assert all((work.done, work.total) == (2, 2) for work in steps)
    assert len(heard.named("evaluating")) == len([r for r in records if r["kind"] == "eval"]) == 2


@pytest.mark.long
@pytest.mark.parametrize("engine", ["plain", "paged"])
def test_sampled_tokens_are_counted(engine):
    session, heard = build(loads(TEAM, "team", [f"sampling.engine={engine}"])), Heard()
    with listening(heard):
        _, ledger = evaluate_team(session, session.current_team(), stage=0)
    counted = heard.named("tokens")
    assert {work.unit for work in counted} == {"tokens"}
    done, sampled = sum(work.done for work in counted), sum(ledger.sampled_tokens.values())
    assert sampled <= done <= sum(work.total for work in counted)
    assert engine == "paged" or done == sampled, "the paged sampler looks every few steps, and counts those that ended"


def test_loading_says_how_much_there_is_to_read(tmp_path):
    model, tokenizer = tiny_model(TinyShape(1, 16, 2), seed=0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    heard = Heard()
    with listening(heard):
        load_pretrained(str(tmp_path))
    assert [work.what for work in heard.works] == [f"loading {tmp_path} (0.00 GB)"]


# -- what would take hours ------------------------------------------------------------------------------------


@pytest.mark.long
def test_an_imitated_bf16_is_refused_for_all_but_small_models(monkeypatch):
    settings = loads(TEAM, "team", ["learner.precision=bf16"])
    monkeypatch.setattr(models, "has_bf16", lambda: False)
    build(settings)
    monkeypatch.setattr(models, "MOST_IMITATED", 1000)
    with pytest.raises(UserError, match=r"no bfloat16 arithmetic .* set learner\.precision: fp32"):
        build(settings)
    build(loads(TEAM, "team", ["learner.precision=fp32"]))
    monkeypatch.setattr(models, "has_bf16", lambda: True)
    build(settings)
