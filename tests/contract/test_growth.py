"""bench/growth.py: what is measured, kept and told: exact for made points, and the smallest grid for real."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from teamtr.engines.paged.sampler import Server
from teamtr.errors import UserError

ROOT = Path(__file__).parents[2]
PHASES = ("sample", "score", "train", "gate")


@pytest.fixture(scope="module")
def growth() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        yield importlib.import_module("growth")


@pytest.fixture
def page(growth: ModuleType) -> ModuleType:
    return sys.modules["growth_page"]


@pytest.fixture
def pieces(growth: ModuleType) -> ModuleType:
    return sys.modules["pieces"]


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is a card; and what a point's process does to its threads is not done to this one."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)


def made(growth: ModuleType, point, phases: dict[str, float], repeats: int = 2, cut: str | None = None):
    """A point as if it had been measured: every round the same."""
    rounds = () if cut else (phases,) * repeats
    return growth.Measured(
        point, growth.ON_A_CPU.middle, "cpu", "one CPU core", 60.0, rounds, None if cut else 0.5, cut, 0.9,
        {"torch": "2"},
    )  # fmt: skip


@pytest.fixture
def lines(growth: ModuleType, tmp_path: Path) -> Path:
    """Agents: sampling grows with their square, the gate not up to 4 and then linearly; 32 agents were cut off."""
    file = tmp_path / "made.jsonl"
    middle = growth.ON_A_CPU.middle
    rows = []
    for n in (1, 2, 4, 8, 16):
        phases = {"sample": 0.1 * n**2, "score": 0.2 * n, "train": 0.5 * n**1.5, "gate": 0.1 * max(1.0, n / 4)}
        rows.append(made(growth, replace(middle, agents=n), phases))
    rows.append(made(growth, replace(middle, agents=32), {}, cut="over 60 s"))
    for tokens in (32, 64):
        rows.append(made(growth, replace(middle, tokens=tokens), dict.fromkeys(PHASES, float(tokens)), repeats=1))
    file.write_text("".join(row.as_line() for row in rows))
    return file


# -- what is measured ---------------------------------------------------------------------------------------------


def test_who_is_updated_has_contexts_of_middle_length_on_average(growth):
    for agents in (1, 2, 3, 4):
        assert growth.updated(agents) == list(range(agents))
    assert growth.updated(8) == [0, 2, 5, 7]
    assert growth.updated(16) == [1, 5, 10, 14]
    for agents in range(5, 40):
        chosen = growth.updated(agents)
        assert len(set(chosen)) == 4
        assert sum(chosen) / 4 == (agents - 1) / 2


def test_a_round_stands_for_all_agents_and_half_a_round_for_nobody(growth):
    point = replace(growth.ON_A_CPU.middle, agents=16)
    updates = [{"phases": dict.fromkeys(PHASES, float(k))} for k in range(1, 8)]
    (one,) = growth.whole_rounds(point, updates)
    assert one == dict.fromkeys(PHASES, 4.0 * (1 + 2 + 3 + 4))
    assert growth.whole_rounds(point, updates[:3]) == ()


def child(*lines: str, then: str = "") -> list[str]:
    return [sys.executable, "-c", f"import sys, time\nsys.stdout.write({''.join(x + chr(10) for x in lines)!r})\n"
            f"sys.stdout.flush()\n{then}"]  # fmt: skip


@pytest.mark.long
def test_a_round_plays_once_and_that_counts_before_every_update(growth, cpu, monkeypatch):
    played, play = [], growth._play

    def counted(engine, a, seed):
        played.append(seed)
        return play(engine, a, seed)

    monkeypatch.setattr(growth, "_play", counted)
    point = replace(growth.ON_A_CPU.middle, agents=3, episodes=4, group=2, prompt=3, tokens=4)
    _, *updates = growth.measure(point, 2)
    assert played == [1, 2]
    sampled = [one["phases"]["sample"] for one in updates]
    assert sampled == [sampled[0]] * 3 + [sampled[3]] * 3
    first, second = growth.whole_rounds(point, updates)
    assert (first["sample"], second["sample"]) == pytest.approx((3 * sampled[0], 3 * sampled[3]))


@pytest.mark.long
@pytest.mark.parametrize(("most", "waves"), [(4, 1), (3, 2), (1, 4)])
def test_sampling_in_pieces_reads_what_a_play_reads_and_counts_every_token(most, waves, pieces, cpu, monkeypatch):
    """On a clock that counts what is computed: a step takes as many seconds as the tokens that a row reads. With room
    for fewer rows, each wave has its own steps."""
    clock, asked = {"s": 0.0}, []

    class Engine:
        learners = ("a0", "a1")

        def sample(self, agent, prompts, noise):
            prompt, tokens = len(prompts[0]), noise.shape[1]
            asked.append((agent, prompt, tokens))
            clock["s"] += prompt + sum(prompt + k for k in range(tokens))

    def timed(work):
        before = clock["s"]
        return pieces.Timed(work(), clock["s"] - before, 2 * (clock["s"] - before))

    monkeypatch.setattr(pieces.Timed, "of", staticmethod(timed))
    monkeypatch.setattr(pieces, "PIECE", 10)
    monkeypatch.setattr(pieces, "at_once", lambda engine, agent, rows, tokens: most)
    a = SimpleNamespace(shape="tiny", problems=2, group=2, prompt=8, tokens=100)
    played = pieces.in_pieces(Engine(), a, 1, 4)
    first = [8 + 8 + waves * 99 * (8 + 50), 108 + 108 + waves * 99 * (108 + 50)]
    assert played.wall == pytest.approx(sum(first), rel=0.01)
    assert played.busy == 2 * played.wall
    assert {(agent, prompt) for agent, prompt, tokens in asked if tokens == 11} == {
        (agent, base + at) for agent, base in (("a0", 8), ("a1", 108)) for at in (7, 32, 57, 82)
    }
    for agent, read in (("a0", 8), ("a1", 108)):
        contexts, messages, _ = played.found[agent]
        assert ([len(c) for c in contexts], [len(m) for m in messages]) == ([read] * 4, [100] * 4)
    np.testing.assert_array_equal(played.found["a1"][0][3][8:], played.found["a0"][1][3])


@pytest.mark.long
def test_rows_in_a_wave_are_those_whose_cache_fits(pieces, cpu, monkeypatch):
    """Seven blocks of 64 keys and values in every layer, in float32, one of them scratch. Asked beside the sampler."""
    common = sys.modules["common"]
    shape = common.SHAPES["tiny"]
    block = 2 * 64 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 4
    model = common.make_model("tiny", eos_token_id=common.NEVER)
    engine = common.adapted_team(model, 1, "fp32", micro_batch=1, sampler="fp32", pages_gb=7 * block / 2**30)
    assert [pieces.at_once(engine, "a0", 9, tokens) for tokens in (64, 65, 66, 129, 385)] == [6, 6, 3, 3, 1]
    assert pieces.at_once(engine, "a0", 2, 64) == 2
    plain = common.adapted_team(model, 1, "fp32", micro_batch=1)
    assert pieces.at_once(plain, "a0", 9, 449) == 9

    admitted: list[int] = []
    seat = Server._seat

    def counted(self, sequences, *given):
        admitted.append(len(sequences))
        seat(self, sequences, *given)

    monkeypatch.setattr(Server, "_seat", counted)
    for tokens in (65, 66, 129):
        prompts = common.random_prompts(np.random.default_rng(tokens), 9, tokens - 20, shape["vocab_size"])
        admitted.clear()
        engine.sample("a0", prompts, np.full((9, 20), 0.5))
        assert admitted[0] == pieces.at_once(engine, "a0", 9, tokens)


@pytest.mark.long
def test_a_point_in_pieces_is_measured_and_marked(growth, page, cpu):
    point = replace(growth.ON_A_CPU.middle, episodes=4, group=2, prompt=3, tokens=8)
    warm, *updates = growth.measure(point, 1, 2)
    assert warm == {"warm": True}
    assert len(updates) == 2
    one = replace(made(growth, replace(growth.ON_A_CPU.middle, tokens=64), updates[0]["phases"]), pieces=2)
    assert "With 64 tokens of a message, sampling was timed in 2 pieces" in page.part({one.point: one}, "f", None)
    plain = made(growth, growth.ON_A_CPU.middle, updates[0]["phases"])
    assert "pieces" not in page.part({plain.point: plain}, "f", None)


def test_a_point_that_takes_too_long_is_ended_and_what_it_told_is_kept(growth):
    told = json.dumps({"phases": {}, "core": 1.0})
    heard = growth.listen(child('{"warm": true}', told, then="time.sleep(600)"), growth.Limits(600.0, 0.05))
    assert (heard.updates, heard.over) == ([json.loads(told)], "over 0.05 s")
    heard = growth.listen(child(then="time.sleep(600)"), growth.Limits(0.05, 600.0))
    assert (heard.updates, heard.over) == ([], "not warm after 0.05 s")


def test_the_next_point_waits_for_its_turn_while_one_is_measured(growth, tmp_path, monkeypatch):
    """Where cores are free for it. It is not begun before, and one that is not needed is ended."""
    begun: list[growth.Child] = []
    waits = "word = sys.stdin.readline()\nprint(1 if word == 'go\\n' else 2)"
    monkeypatch.setattr(growth, "command_of", lambda point, *_: [sys.executable, "-c", f"import sys\n{waits}"])

    def run_point(point, middle, card, limits, repeats, started, pieces):
        child = started or growth.Child(growth.command_of(point, repeats))
        begun.append(child)
        with child:
            child.go()
            assert child.process.stdout.readline() == "1\n"
        cut = "over" if point.agents == 4 else None
        return made(growth, point, dict.fromkeys(PHASES, 1.0), cut=cut)

    children: list[growth.Child] = []
    monkeypatch.setattr(
        growth, "Child", lambda command, make=growth.Child: children.append(make(command)) or children[-1]
    )
    monkeypatch.setattr(growth, "run_point", run_point)
    monkeypatch.setattr(growth.torch.cuda, "is_available", lambda: True)
    growth.measure_all(growth.ON_A_CPU, ["agents"], tmp_path / "points.jsonl", "cpu", growth.Limits(1.0, 20.0), 1)
    assert [children.index(child) for child in begun] == [1, 0, 2], "the second waited before the first began"
    assert len(children) == 4, "one more waited behind the one that was cut off"
    assert all(child.process.poll() is not None for child in children)


def test_points_are_measured_again_where_that_is_asked_for(growth, tmp_path, monkeypatch):
    measured, file, grid = [], tmp_path / "points.jsonl", growth.ON_A_CPU

    def run_point(point, middle, card, limits, repeats, started, pieces):
        measured.append((point.episodes, pieces))
        return made(growth, point, dict.fromkeys(PHASES, 1.0))

    monkeypatch.setattr(growth, "run_point", run_point)
    small = growth.Grid(grid.middle, {"episodes": (16, 32)})
    for pieces, again in ((None, False), (None, False), (3, True)):
        growth.measure_all(small, ["episodes"], file, "cpu", growth.Limits(1.0, 1.0), 1, pieces, again)
    assert measured == [(16, None), (32, None), (16, 3), (32, 3)]


def test_a_point_that_does_not_fit_is_told_apart_from_one_that_fails(growth):
    assert growth.listen(child('{"cut": "does not fit"}'), growth.Limits(600, 600)).cut == "does not fit"
    killed = child('{"warm": true}', then="import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert "out of memory" in growth.listen(killed, growth.Limits(600, 600)).cut
    with pytest.raises(SystemExit, match="no such thing"):
        growth.listen(child(then="raise RuntimeError('no such thing')"), growth.Limits(600, 600))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "does not fit"),
        (UserError("one message needs 9 pages\nof many"), "refused: one message needs 9 pages"),
    ],
)
def test_a_point_s_process_tells_why_it_ends(growth, cpu, error, told, monkeypatch):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(growth, "_load_libraries", lambda a: None)
    monkeypatch.setattr(growth, "make_model", refuse)
    assert list(growth.measure(growth.ON_A_CPU.middle, 1)) == [{"cut": told}]


def test_the_same_command_goes_on_where_it_stopped(growth, tmp_path, monkeypatch, capsys):
    asked: list[int] = []

    def run_point(point, middle, card, limits, repeats, started, pieces):
        asked.append(point.agents)
        cut = "over" if point.agents > limits.limit_s / 10 else None
        return replace(made(growth, point, dict.fromkeys(PHASES, 1.0), cut=cut), limit_s=limits.limit_s)

    def measure(limit: float, card: str = "cpu") -> list[int]:
        asked.clear()
        growth.measure_all(growth.ON_A_CPU, ["agents"], file, card, growth.Limits(1.0, limit), 1)
        return list(asked)

    monkeypatch.setattr(growth, "run_point", run_point)
    file = tmp_path / "points.jsonl"
    assert measure(20.0) == [1, 2, 4], "larger ones than the first that was cut off are left out"
    assert measure(20.0) == []
    assert measure(40.0) == [4, 8], "with a larger limit it is tried again"
    kept = growth.read(file)
    assert [one.cut for one in kept.values()] == [None, None, None, "over"]
    with pytest.raises(SystemExit, match="another grid"):
        measure(40.0, card="H200")


def test_a_line_that_is_no_point_is_told_with_its_number(growth, lines):
    lines.write_text(lines.read_text() + '{"point": ')
    with pytest.raises(SystemExit, match="line 9 is no point"):
        growth.read(lines)


@pytest.mark.parametrize(
    ("name", "card"),
    [("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-80GB", "A100-80"), ("NVIDIA GeForce RTX 4090", "RTX4090")],
)
def test_the_card_that_is_here_is_found_in_the_table(growth, name, card, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: name)
    assert growth.this_card() == card
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA B300")
    with pytest.raises(UserError, match="give --card"):
        growth.this_card()


# -- what is told of it -------------------------------------------------------------------------------------------


def test_a_plan_that_was_made_where_a_point_ran_stands_beside_its_peak(growth, page, lines, monkeypatch):
    """What a run settles on may be another micro-batch than the one that fits by the card's data sheet."""
    told = [
        '{"warm": true, "planned_gb": 154.0}',
        json.dumps({"phases": dict.fromkeys(PHASES, 1.0), "core": 1.0, "peak_gb": 135.0}),
    ]
    monkeypatch.setattr(growth, "command_of", lambda *_: child(*told))
    middle = growth.ON_A_CPU.middle
    ran = growth.run_point(replace(middle, agents=1), middle, "cpu", growth.Limits(600.0, 600.0), 1)
    lines.write_text(ran.as_line() + made(growth, middle, dict.fromkeys(PHASES, 1.0)).as_line())
    measured = growth.read(lines)
    by_sheet = page.predicted(middle, "cpu").memory.plan.total / 2**30
    ends = [
        line.split(" | ")[-2:] for line in page.markdown(measured).splitlines() if line.startswith(("| 1 |", "| 2 |"))
    ]
    assert ends == [["135", "154 |"], ["0.5", f"{by_sheet:.3g} |"]]


def test_exponents_and_bends_are_those_of_the_points_that_were_not_cut_off(growth, page, lines):
    measured = growth.read(lines)
    points = page.on_axis(measured, growth.ON_A_CPU.middle, "agents")
    assert [point.agents for point in points] == [1, 2, 4, 8, 16, 32]
    found = {one.what: one for one in page.growths([measured[p] for p in points[:-1]], "agents")}
    assert found["sample"].measured == "2.00 [2.00, 2.00]"
    assert found["train"].measured == "1.50 [1.50, 1.50]"
    assert (found["sample"].bend, found["train"].bend) == ("", "")
    assert found["gate"].bend == "at 4: 0.00, then 1.00"
    assert found["memory"].measured == "0.00"


def test_the_tables_have_every_point_with_its_prediction(growth, page, lines):
    text = page.markdown(growth.read(lines))
    plan = page.predicted(replace(growth.ON_A_CPU.middle, agents=4), "cpu")
    seconds = sum(plan.phases[phase].seconds for phase in PHASES)
    assert seconds > 0.0
    row = next(line for line in text.splitlines() if line.startswith("| 4 |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:6] == ["1.6", "0.8", "4", "0.1", "6.5"]
    assert cells[6:8] == [f"{seconds:.3g}", f"{seconds / 6.5:.2f}"]
    assert "| 32 | over 60 s |" in text
    by_agents, by_length = text.split("**By tokens of a message**")
    assert "[" in by_agents
    assert "[" not in by_length, "one round has no interval"
    assert "**By episodes**" not in text, "the middle alone is no axis"


def test_a_grid_of_which_nothing_was_measured_is_told_as_such(growth, page):
    middle = growth.ON_A_CPU.middle
    points = [middle, replace(middle, agents=4)]
    text = page.part({point: made(growth, point, {}, cut="does not fit") for point in points}, "x.jsonl", None)
    assert "Means of 0 rounds" in text
    assert text.count("| does not fit |") == 2
    assert "to the power of" not in text


def test_predictions_follow_the_shape_that_is_measured(growth, page):
    """On a card half precision and the paged sampler, on a CPU float32 and the plain one; an untied model is one."""
    middle = growth.ON_A_CPU.middle
    on_cpu, on_card = page.setup_of(middle, "cpu"), page.setup_of(middle, "H200")
    assert (on_cpu.sampling.paged, on_cpu.learning.precision) == (False, "fp32")
    assert (on_card.sampling.paged, on_card.learning.precision) == (True, "fp16")
    assert on_card.cluster.card.name == "H200"
    billions = {name: page.shape_of(name).parameters / 1e9 for name in growth.ON_A_CARD.values["model"]}
    assert billions == pytest.approx(
        {"small": 0.1345, "0.6b": 0.596, "1.7b": 1.721, "4b": 4.022, "8b": 8.191}, rel=1e-3
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["tiny", "8b"])
def test_models_are_made_as_they_are_predicted_tied_or_not(growth, page, name, monkeypatch):
    monkeypatch.setattr(sys.modules["common"], "device", lambda: torch.device("meta"))
    model = growth.make_model(name)
    assert model.num_parameters() == page.shape_of(name).parameters
    assert model.config.tie_word_embeddings == (name != "8b")


def test_the_figure_has_points_and_a_dashed_line_of_the_same_color(growth, page, lines):
    drawing = page.drawing(growth.read(lines))
    assert [panel.title for panel in drawing.panels] == ["by agents", "by length"]
    first = drawing.panels[0]
    assert first.logarithmic == "xy"
    assert [series.label for series in first.series] == [*PHASES, *(f"{phase}, predicted" for phase in PHASES)]
    assert first.series[0].x == (1.0, 2.0, 4.0, 8.0, 16.0)
    assert first.series[0].y == pytest.approx((0.1, 0.4, 1.6, 6.4, 25.6))
    assert first.series[4].x[-1] == 32.0, "the prediction goes on where a point was cut off"
    assert [series.like for series in first.series[4:]] == [0, 1, 2, 3]


def test_a_part_of_the_page_is_written_between_its_marks_and_nothing_else(growth, page, lines, tmp_path):
    file = tmp_path / "page.md"
    text = "# Title\n<!-- growth on a cpu: begin -->old<!-- growth on a cpu: end -->\nThe end.\n"
    file.write_text(text)
    page.draw(lines, None, file)
    once = file.read_text()
    assert once.startswith("# Title\n<!-- growth on a cpu: begin -->\n\nMeasured on one CPU core")
    assert once.endswith("<!-- growth on a cpu: end -->\nThe end.\n")
    assert "old" not in once
    page.draw(lines, None, file)
    assert file.read_text() == once
    file.write_text("# Title\n")
    with pytest.raises(SystemExit, match="put one line <!-- growth on a cpu: begin -->"):
        page.draw(lines, None, file)


def test_the_page_of_the_repository_has_what_is_drawn_from_its_lines(growth, page):
    """Also after the throughput model has changed: then it is to be drawn anew."""
    text = (ROOT / "docs" / "growth.md").read_text()
    for name in ("cpu", "card"):
        file = ROOT / "docs" / f"growth-{name}.jsonl"
        if file.exists():
            figure = f"figures/growth-{name}.svg"
            again = f"python bench/growth.py --draw docs/{file.name} --figure docs/{figure} --page docs/growth.md"
            assert page.part(growth.read(file), file.name, figure) in text, f"run: {again}"
        else:
            assert name == "card"
            assert "**Not measured yet.**" in text


def test_the_limits_of_points_are_told_from_the_least_to_the_most(growth, page):
    one = made(growth, growth.ON_A_CPU.middle, dict.fromkeys(PHASES, 1.0))
    later = replace(one, point=replace(one.point, agents=4), limit_s=250.0)
    assert "limit of a point: 60 s." in page.part({one.point: one}, "x.jsonl", None)
    assert "limit of a point: 60 to 250 s." in page.part({m.point: m for m in (one, later)}, "x.jsonl", None)


def test_what_the_page_says_of_a_card_follows_from_its_lines(growth, page):
    """Sentences are written by hand: they are to be written anew when points or rates change."""
    text = (ROOT / "docs" / "growth.md").read_text().partition("What the tables show, with one round per point:")[2]
    said = " ".join((text.partition("<!--")[0] + text.rpartition("-->")[2]).split())
    measured = growth.read(ROOT / "docs" / "growth-card.jsonl")
    middle = next(iter(measured.values())).middle

    def on(axis: str) -> list:
        return [measured[point] for point in page.on_axis(measured, middle, axis)]

    def told(numbers: list[float]) -> str:
        return f"{min(numbers):.2f} to {max(numbers):.2f}"

    by_phase = {one.what: one for one in page.growths(on("agents"), "agents")}
    power = float(by_phase["sample"].measured)
    assert f"Sampling grows with the number of agents to the power of {power:.1f}." in said
    after = float(by_phase["stage"].bend.removeprefix("at 4: ").rpartition(" ")[2])
    assert f"From four agents on, the whole stage grows to the power of {after:.1f}," in said
    trained = [one.seconds("train")[0] for one in on("length") if one.point.tokens <= 1024]
    assert f"training takes {min(trained):.1f} to {max(trained):.1f} s" in said

    plans = {point: page.predicted(point, "H200") for point in measured}
    joined = replace(middle, tokens=16384), replace(middle, episodes=2048)
    shares = {
        point: round(page.predicted_seconds(plan, "stage") / measured[point].seconds("stage")[0], 2)
        for point, plan in plans.items()
    }
    long, many = map(shares.pop, joined)
    assert f"plan predicts {long} of the measured seconds for messages of 16,384 tokens, and {many} for 2,048" in said
    busy, idle = [s for s in shares.values() if s > 0.75], [s for s in shares.values() if s <= 0.75]
    assert f"it predicts {told(busy)} of the measured seconds where the card is busy, and {told(idle)} where" in said
    above = {point: page.predicted_gb(measured[point], plan) / measured[point].peak_gb for point, plan in plans.items()}
    assert f"({above[joined[0]]:.2f} at 16,384 tokens" in said
    low, *most = sorted(above.values())
    assert low < 1.0
    assert f"memory is {most[0]:.2f} to {most[-1]:.1f} times the measured peak at every point but one" in said
    longest, plan = measured[joined[0]], plans[joined[0]]
    sampled, gate, stage = (page.predicted_seconds(plan, phase) for phase in ("sample", "gate", "stage"))
    took = f"The stage took {longest.seconds('stage')[0]:.0f} s ({stage:.0f} by plan)"
    assert f"{took}, with a peak of {longest.peak_gb:.0f} GB." in said
    assert f"**Sampling** took {longest.seconds('sample')[0]:.0f} s ({sampled:.0f} by plan)." in said
    assert f"**The gate** took {longest.seconds('gate')[0]:.1f} s ({gate:.1f} s by plan)." in said


# -- end to end ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_smallest_grid_is_measured_drawn_and_not_measured_again(growth, cpu, tmp_path, monkeypatch):
    asked = []

    def listen(command, limits, started):
        assert started is None
        asked.append(command)
        point, repeats = command[command.index("--measure") + 1], command[command.index("--repeats") + 1]
        warm, *updates = growth.measure(growth.Point(**json.loads(point)), int(repeats))
        assert warm == {"warm": True}
        return growth.Heard(updates)

    middle = replace(growth.ON_A_CPU.middle, agents=1, episodes=4, group=2, prompt=3, tokens=4)
    monkeypatch.setattr(growth, "ON_A_CPU", replace(growth.ON_A_CPU, middle=middle))
    monkeypatch.setattr(growth, "listen", listen)
    (tmp_path / "page.md").write_text("<!-- growth on a cpu: begin --><!-- growth on a cpu: end -->")
    out, figure = tmp_path / "points.jsonl", tmp_path / "growth.svg"
    arguments = ["--axis", "length", "--length", "4,8", "--repeats", "1", "--out", str(out), "--figure", str(figure)]
    for _ in range(2):
        growth.main([*arguments, "--page", str(tmp_path / "page.md")])
    assert len(asked) == 2
    found = growth.read(out)
    assert [point.tokens for point in found] == [4, 8]
    assert all(one.rounds[0][phase] > 0.0 for one in found.values() for phase in PHASES)
    assert all(one.peak_gb >= 0.0 and one.cut is None and one.core > 0.0 for one in found.values())
    assert figure.read_bytes().startswith(b"<?xml")
    assert (
        "![seconds of a stage by phase, measured and predicted, along each axis](growth.svg)"
        in (tmp_path / "page.md").read_text()
    )
