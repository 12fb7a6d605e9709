"""Every benchmark runs without a GPU, with a small model, and prints its record; the experiment reads its logs."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
import tarfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from teamtr.analysis.figures.paint import painted
from teamtr.config import loads
from teamtr.engines.torch.loading import TinyShape, tiny_model
from teamtr.reproduce import Setting, cells_of, find
from teamtr.session.train import train

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch, capsys):
    """Run a benchmark as its command does; what it printed on stdout, and on stderr. What a benchmark sets for its own
    process is set back afterwards."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    loudness, threads = transformers.logging.get_verbosity(), torch.get_num_threads()

    def run(name: str, *arguments: str) -> tuple[dict, str]:
        monkeypatch.setattr(sys, "argv", [name, *arguments, "--json"])
        importlib.import_module(name).main()
        said = capsys.readouterr()
        return json.loads(said.out), said.err

    with warnings.catch_warnings():
        yield run
    transformers.logging.set_verbosity(loudness)
    torch.set_num_threads(threads)


def test_rollout(bench):
    record, _ = bench("rollout", "--rows", "4", "--prompt", "16", "--new", "4")
    assert record["floor"] > 0
    assert set(record["results"]) == {"ours", "generate", "generate, static cache"}
    for result in record["results"].values():
        assert result["share of floor"] == pytest.approx(result["decode"] / record["floor"])
        assert 0 < result["flops utilisation"] < 1
        assert result["whole x generate"] == pytest.approx(result["whole"] / record["results"]["generate"]["whole"])
    assert record["precision"] == "fp32"
    assert record["versions"]["torch"]


@pytest.mark.long
def test_rounding_costs_a_model_more_with_fewer_bits_and_fewer_scales(bench):
    record, _ = bench("rounding", "tiny", "--tokens", "512")
    exact, half, small, one_scale = record["rows"]
    assert (exact["base"], exact["kl per token"], exact["tokens"]) == ("`fp32`", 0.0, 2 * 255)
    assert 0 < half["kl per token"] < small["kl per token"] < one_scale["kl per token"] < 1e-4


def test_the_first_token_part_by_part(monkeypatch, tmp_path):
    """Of one process; the command starts several, each of which imports everything anew."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.setenv("TEAMTR_CACHE", "off")
    first_token = importlib.import_module("first_token")
    monkeypatch.setattr(first_token, "compile_seconds", lambda: 0.0)  # other tests of this process may have compiled
    first_token.make_model("tiny").save_pretrained(tmp_path)
    before = first_token.graphs()
    sizes = {"shape": "tiny", "rows": 2, "prompt": 4, "new": 3, "precision": "fp32", "compiled": "no"}
    found = first_token.one_process(SimpleNamespace(**sizes, model=tmp_path, began=time.time() - 100.0))
    assert set(found) == {"to first token", *first_token.PARTS, "graphs"}
    assert found["imports"] >= 100.0, "they begin with the command"
    assert found["to first token"] >= found["imports"] + found["loading"] + found["first token"]
    assert min(found["loading"], found["first token"], found["decode"], found["again"]) > 0
    assert found["graphs"] == before, "nothing is compiled"


LONG = ("--shape", "tiny", "--tokens", "4", "--episodes", "2", "--prompt", "8")
UPDATES = [(agent, phase) for agent in ("a0", "a1") for phase in ("score", "train", "gate")]


@pytest.mark.parametrize("more", [("--recompute", "always"), ("--pieces", "2"), ("--one-copy",)])
def test_a_stage_on_long_messages_phase_by_phase(bench, more):
    record, _ = bench("long", *LONG, "--radius", "0.5", *more)
    sample, *updates, stage = record["results"]
    assert (sample["phase"], stage["phase"]) == ("sample", "stage")
    assert [(row["agent"], row["phase"]) for row in updates] == UPDATES
    assert {row["recomputed"] for row in updates} == {"always" in more}
    for kind in ("seconds", "planned s"):
        assert min(row[kind] for row in record["results"]) > 0
        assert stage[kind] == pytest.approx(2 * sample[kind] + sum(row[kind] for row in updates)), "sampled twice"
    gates = [row for row in updates if row["phase"] == "gate"]
    assert [(row["outcome"], row["messages measured"]) for row in gates] == [("accepted", 2)] * 2
    assert all(0 < row["KL, nats per message"] < 0.5 for row in gates)
    assert [row["passed / asked"] for row in updates if row["phase"] == "train"] == [1.0, 1.0]


def test_the_first_step_in_float16_begins_with_the_loss_scale_of_the_rehearsal(bench, monkeypatch):
    """Without it, what overflows is computed again, and takes as much longer."""

    def passed() -> list[float]:
        record, _ = bench("long", *LONG, "--words", "random", "--precision", "fp16")
        return [row["passed / asked"] for row in record["results"] if row["phase"] == "train"]

    monkeypatch.setattr("teamtr.engines.optim.FIRST_LOSS_SCALE", 2.0**40)
    assert max(passed()) < 3.0
    monkeypatch.setattr("teamtr.engines.optim.Adam.begin_at", lambda self, scale: None)
    assert min(passed()) > 5.0


def test_a_step_of_a_stage_by_kernel(bench):
    record, told = bench("step", "--shape", "tiny", "--problems", "2", "--group", "2", "--tokens", "4")
    assert [row["speaks"] for row in record["results"]] == ["first", "third"]
    assert [row["tokens"] for row in record["results"]] == [4 * 8, 4 * 16], "two more messages are read"
    assert all(min(row["begin, s"], row["step, s"], row["measure, s"]) > 0 for row in record["results"])
    assert "third, kernels a step:" in told


def test_long_messages_that_nobody_samples(bench):
    record, _ = bench("long", *LONG, "--words", "random")
    assert [(row["agent"], row["phase"]) for row in record["results"]] == UPDATES


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("long", ("--episodes", "0"), "no whole number above 0"),
        ("long", ("--tokens", "16,x"), "'16,x' is no whole number"),
        ("long", ("--markdown",), "goes with --planned"),
        ("long", ("--tokens", "4", "--pieces", "8"), "a message of 4 tokens has no 8 pieces"),
        ("long", ("--pieces", "2", "--words", "random"), "give one of them"),
        ("growth", ("--pieces", "17", "--shape", "tiny", "--out", "no.jsonl"), "has no 17 pieces"),
        ("growth", ("--out", "made.jsonl", "--agents", "0"), "no whole number above 0"),
        ("growth", ("--out", "made.jsonl", "--episodes", "16,20"), "20 are no whole groups of 8"),
    ],
)
def test_sizes_that_cannot_be_measured_are_refused(monkeypatch, capsys, name, arguments, told):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit):
        importlib.import_module(name).main()
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_rollout_says_what_its_time_goes_to(bench):
    small = ("--rows", "4", "--prompt", "16", "--new", "4", "--skip", "generate", "--skip", "generate, static cache")
    record, said = bench("rollout", *small, "--profile")
    assert set(record["results"]) == {"ours"}
    assert "rotated_attention" in said
    with pytest.raises(SystemExit):
        bench("rollout", "--rows", "4", "--prompt", "16", "--new", "4", "--skip", "nobody")


def test_update_reports_what_monitoring_costs(bench):
    record, said = bench("update", "--messages", "16", "--context", "16", "--tokens", "8")
    ours = record["results"]["ours"]
    assert ours["update s"] == pytest.approx(ours["score s"] + ours["train s"] + ours["gate s"])
    assert 0 < ours["gate share"] < 1
    assert "KL share" in ours
    assert "padded" in said, "every result is told at once"


@pytest.mark.slow
def test_update_with_scores_of_the_sampler_beside_its_own(bench):
    record, _ = bench("update", "--messages", "16", "--context", "16", "--tokens", "8", "--score", "own,sampler")
    own, kept = (record["results"][name] for name in ("ours", "ours, scores of the sampler"))
    assert (own["sampler scored"], kept["sampler scored"], kept["own scores"]) == (0, 16, "")
    assert kept["KL upper"] == pytest.approx(own["KL upper"], abs=1e-6)
    assert kept["mismatch KL"] < 1e-9


@pytest.mark.slow
def test_stage_with_scores_of_the_sampler(bench):
    small = ["--agents", "2", "--problems", "2", "--group", "2", "--tokens", "4", "--prompt", "8"]
    record, _ = bench("stage", "--parts", "ours", *small, "--score", "own,sampler")
    own, kept = (record["results"][name]["updates"] for name in ("ours", "ours, scores of the sampler"))
    for agent in ("a0", "a1"):
        assert (own[agent]["sampler_scored"], kept[agent]["sampler_scored"]) == (0, 4)
        assert kept[agent]["tokens"]["trained"] == own[agent]["tokens"]["trained"]
    with pytest.raises(SystemExit):
        bench("stage", "--parts", "ours", *small, "--score", "nobody")


@pytest.mark.slow
def test_stage_with_one_copy_of_the_base(bench, monkeypatch):
    """The sampler reads the learner's weights: none of the base's matrices has a second place in memory."""
    made, stage = [], importlib.import_module("stage")
    team_of = stage.team_of
    monkeypatch.setattr(
        stage, "team_of", lambda *given, **settings: made.append(team_of(*given, **settings)) or made[-1]
    )
    small = ["--agents", "2", "--problems", "2", "--group", "2", "--tokens", "4", "--prompt", "8"]
    record, _ = bench("stage", "--parts", "ours", *small, "--one-copy", "--sampler", "fp16", "--pages-gb", "0.1")
    assert record["results"]["ours"]["sampled tokens"] > 0
    policy = made[0].learner("a0").policy
    learned = policy.causal_lm.get_input_embeddings().weight
    (server,) = policy.serving._servers.values()
    sampled = server.copy.model.get_input_embeddings().weight
    assert learned.dtype == torch.float16
    assert learned.data_ptr() == sampled.data_ptr()


@pytest.mark.slow
def test_stage_by_phase_beside_rivals_of_which_one_breaks(bench, monkeypatch, capsys):
    def broken(*_, **__):
        raise pickle.PicklingError("a library that is not ours")

    monkeypatch.setattr(importlib.import_module("stage"), "grpo_step", broken)
    small = ["--problems", "2", "--group", "2", "--tokens", "4", "--prompt", "8"]
    with pytest.raises(SystemExit, match="TRL: not measured: PicklingError: a library that is not ours"):
        bench("stage", "--parts", "ours,rivals,memory", *small)
    record = json.loads(capsys.readouterr().out)  # what was measured is told before it fails
    ours = record["results"]["ours"]
    assert ours["sample"] == pytest.approx(sum(ours[f"turn {k}"] for k in (1, 2, 3)), rel=0.2)
    assert ours["sampled tokens"] <= 3 * 3 * 4 * 4
    assert record["times faster"] > 0
    assert ours["sampled tokens/s"] == pytest.approx(ours["sampled tokens"] / ours["sample"])
    assert ours["gate share of the stage"] == pytest.approx(ours["gate"] / ours["whole"])
    assert ours["gate share of the stage"] < ours["gate share without sampling"]
    assert {"ours", "generate + padded", "generate, static cache + padded"} == set(record["results"])
    record, said = bench("stage", "--parts", "rivals", "--rivals", "generate", *small)
    assert set(record["results"]) == {"generate + padded"}
    assert "TRL" not in said
    with pytest.raises(SystemExit):
        bench("stage", "--parts", "rivals", "--rivals", "generate,nobody", *small)


def test_stage_by_plans_that_decide_as_in_training(bench, monkeypatch):
    monkeypatch.setattr(importlib.import_module("stage"), "PLANS", ("teamtr", "auto"))
    small = ["--agents", "2", "--problems", "2", "--group", "2", "--tokens", "4", "--prompt", "8"]
    record, _ = bench("stage", "--parts", "plans", *small)
    fresh, auto = (record["results"][f"plan {name}"] for name in ("teamtr", "auto"))
    assert fresh["actions"] == "sample sample"
    assert auto["actions"].startswith("sample ")
    assert auto["sampled tokens"] <= fresh["sampled tokens"]
    assert auto["least share"] > 0


def test_architectures_that_work_and_one_that_is_refused(bench):
    record, said = bench("architectures", "--only", "llama,gpt2,mamba")
    assert record["counts"] == {"works": 2, "refused": 1}
    assert (record["results"]["llama"]["learner"], record["results"]["llama"]["sampler"]) == ("packed", "pages")
    assert "mamba" in said, "every result is told at once"


def test_grading_scoring_and_saving_beside_sampling(bench, tmp_path):
    record, _ = bench("overlap", "--parts", "grading", "--seconds", "0", "--tokens", "4", "--rounds", "1")
    assert record["rows"][0]["ratio"] > 0
    overlap = importlib.import_module("overlap")
    scored = overlap.side_by_side(tmp_path, tokens=2, rounds=1)
    assert scored["in turns"] == scored["sample"] + scored["score"]
    saved = overlap.saving(tmp_path, "lora", width=32, layers=1, tokens=4, rounds=1)
    assert 0 < saved["waited, first"] < saved["stage, first"]
    assert min(saved["hash"], saved["commit"], saved["sample"], saved["update"], saved["stage, beside"]) > 0
    elsewhere = overlap.saving_elsewhere(tmp_path, millions=1, pause=0.01)
    assert elsewhere["in turns"] > 0.01 < elsewhere["beside"]
    assert min(overlap.files(tmp_path, millions=1).values()) > 0


@pytest.mark.parametrize("folder", ["bench", "experiments"])
def test_every_script_of_a_page_imports_what_there_is(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / folder))
    scripts = sorted(file.stem for file in (ROOT / folder).glob("*.py"))
    assert scripts
    for script in scripts:
        importlib.import_module(script)


@pytest.mark.slow
def test_precision_has_a_row_for_each_arithmetic_and_the_mismatch(bench, monkeypatch):
    monkeypatch.setattr(importlib.import_module("precision"), "PERTURBATIONS", (1e-3, 1e-1))
    shapes = importlib.import_module("common").SHAPES  # without instructions for it, bf16 is slow on a CPU
    monkeypatch.setitem(
        shapes, "tiny", {**shapes["tiny"], "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
    )
    record, _ = bench("precision", "--lengths", "4", "--messages", "4")
    rows = {r["precision"]: r for r in record["results"]}
    assert rows["fp32"]["floor"] == 0.0
    assert rows["bf16"]["floor"] > 0.0
    assert rows["fp32"]["halving"] == pytest.approx(4, rel=0.2)
    assert record["mismatch"][0]["largest per token"] < 1e-3


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_plan_stands_beside_what_is_used(bench, monkeypatch, alone):
    """Each case in a process of its own, which loads all libraries again; here in this one, too."""
    plan = importlib.import_module("plan")
    if not alone:
        answer = lambda command, **_: SimpleNamespace(stdout=json.dumps(plan.one(command[-1])))  # noqa: E731
        monkeypatch.setattr(plan, "subprocess", SimpleNamespace(run=answer, PIPE=None))
    record, said = bench("plan", "--cases", "tiny-lora")
    (case,) = record["cases"]
    assert case["planned_gb"] == pytest.approx(sum(item["gb"] for item in case["plan"]["items"]))
    assert case["rehearsed_gb"] is None, "a CPU has no such figure"
    assert "planned / used" in said


@pytest.mark.slow
def test_starts_are_measured_on_questions_that_stand_in_no_prompt(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    starts = importlib.import_module("starts")
    few = ["--only", "sum-1", "--problems", "2", "--samples", "2", "--temperatures", "1", "--set", "device=cpu"]
    monkeypatch.setattr(sys, "argv", ["starts", "--model", str(folder), "--out", str(tmp_path), *few])
    starts.main()
    found = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    pairs = [(prompts, who) for prompts in ("bare", "examples") for who in ("team", "one")] + [("talk", "team")]
    assert [(r["prompts"], r["who"], r["temperature"]) for r in found] == [
        (*pair, temperature) for pair in pairs for temperature in (1.0, 0.0)
    ]
    assert len(capsys.readouterr().out.splitlines()) == len(found)
    rows = [json.loads(line) for line in (tmp_path / "rows" / "largest-4.jsonl").read_text().splitlines()]
    assert len({row["question"] for row in rows}) == len(rows) == starts.ROWS
    assert starts.chance("sum-1", ["9", "9", "4", "7"]) == 0.5
    talk = starts.system_prompt("talk", "finaliser", rows)
    assert f"{rows[0]['question']}\nsolver: {rows[0]['answer']}\nchecker: {rows[0]['answer']}" in talk
    assert f"{rows[1]['question']}\nsolver: {rows[2]['answer']}\nchecker: {rows[1]['answer']}" in talk


@pytest.fixture
def smollm2(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    return importlib.import_module("smollm2")


def test_methods_of_the_experiment_sample_alike(smollm2):
    found = smollm2.methods([0.05, 0.5], stages=12)
    batches = {m.name: m.stages * (1 if m.preset != "teamtr" or m.alone else 3) * (1 if m.alone else 3) for m in found}
    assert set(batches.values()) == {108}, "equally many messages are sampled by every method"
    for alone in (False, True):
        loads(smollm2.team_file("tiny", alone), "team")


def test_the_experiment_reads_torn_and_missing_logs(smollm2, tmp_path):
    folder = tmp_path / "teamtr-0.05-seed0" / "run"
    folder.mkdir(parents=True)
    kept = {"kind": "update", "outcome": "accepted", "kl_upper": 0.06, "radius": 0.05, "kl_full": 0.03,
            "noise_floor": 1e-4, "certificates": [{"kind": "turn_aware", "lower_bound": 0.1}],
            "sampled_tokens_total": 700}  # fmt: skip
    held = {"kind": "eval", "avg_at_k": 0.25, "avg_interval": [0.2, 0.3]}
    lines = [json.dumps(r) for r in (held, kept, {**held, "avg_at_k": 0.5})]
    (folder / "log.jsonl").write_text("\n".join([*lines, '{"kind": "upd']))
    method = next(m for m in smollm2.methods([0.05], 12) if m.name == "teamtr-0.05")
    found = smollm2.summary([method], smollm2.argparse.Namespace(out=tmp_path, seeds=[0, 1]))
    assert found["table"]["teamtr-0.05"]["last"] == [0.5]
    assert found["common_tokens"] == 700
    region = smollm2.region(tmp_path / "teamtr-0.05-seed0")
    assert (region["kept"], region["outside"], region["positive_certificates"]) == (1, 1, 1)
    assert smollm2.region(tmp_path / "teamtr-0.05-seed1")["updates"] == 0
    assert b"by updates" in painted("x", smollm2.drawing(found))


def test_the_bound_has_a_row_for_every_case(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    bound = importlib.import_module("bound")
    monkeypatch.setattr(sys, "argv", ["bound.py", "--batches", "4"])
    bound.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert len(rows) == len(bound.CASES)
    assert all(row.count("|") == 7 for row in rows)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A small model with its tokenizer, as the experiments take them."""
    model, tokenizer = tiny_model(TinyShape(layers=1, width=16, heads=2), seed=0)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_the_swap_of_a_real_model_runs_from_end_to_end(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    sizes = {"team-stages": 1, "stages": 1, "problems": 2, "newcomer-steps": 1, "probes": 16, "max-steps": 2,
             "check-every": 1, "eval-problems": 2, "seeds": 1}  # fmt: skip
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    out = ["--out", str(tmp_path / "out"), "--model", str(folder), "--modes", "aligned,direct"]
    monkeypatch.setattr(sys, "argv", ["swap", *out, *words, "--figure", str(tmp_path / "swap.svg")])
    importlib.import_module("swap").main()
    found = json.loads((tmp_path / "out" / "swap.json").read_text())["0"]
    assert found["aligned"]["alignment"]["kl_upper"] > 0
    assert found["direct"]["updates"] == 3
    assert "| direct |" in capsys.readouterr().out
    assert (tmp_path / "swap.svg").stat().st_size > 1000


@pytest.mark.slow
def test_the_experiment_trains_what_it_then_reads(smollm2, folder, tmp_path, monkeypatch, capsys):
    small = ["plan.problems=2", "plan.group_size=2", "eval.problems=2", "team.max_tokens=3"]
    monkeypatch.setattr(smollm2, "SETTINGS", [*smollm2.SETTINGS, *small])
    out = ["--out", str(tmp_path / "out"), "--model", str(folder), "--seeds", "0", "--radii", "0.5", "--stages", "2"]
    monkeypatch.setattr(sys, "argv", ["smollm2", *out, "--only", "teamtr", "--limit", "100"])
    smollm2.main()
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    [row] = found["table"].values()
    assert len(row["last"]) == 1
    assert row["tokens"][0] > 0
    assert "teamtr" in capsys.readouterr().out


@pytest.fixture
def reuse(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    return importlib.import_module("reuse")


def written(out: Path, name: str, records: list[dict]) -> None:
    folder = out / "words" / name / "run"
    folder.mkdir(parents=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def updates_of(exact: list[float], *, tokens: list[int], times: list[float], action: str) -> list[dict]:
    """A log of updates after each of which exact success is known."""
    kept = {"kind": "update", "outcome": "accepted", "kl_upper": 0.05, "radius": 0.1, "rollouts": {"action": action}}
    found = [
        {**kept, "update": k + 1, "exact_success": exact[k : k + 2], "sampled_tokens_total": token, "time": at}
        for k, (token, at) in enumerate(zip(tokens, times, strict=True))
    ]
    return [{"kind": "start", "time": 100.0}, *found]


def test_plans_are_compared_at_equal_updates_tokens_and_seconds(reuse, tmp_path):
    for seed, lift in ((0, 0.0), (1, 0.1)):
        fresh = updates_of([0.1, 0.2 + lift, 0.5], tokens=[100, 200], times=[110.0, 120.0], action="sample")
        stale = updates_of([0.1, 0.3, 0.4], tokens=[100, 100], times=[104.0, 108.0], action="reuse")
        # It stopped after its first update and went on later: the pause, and what an evaluation takes, do not count.
        pause = [
            {"kind": "resume", "time": 900.0},
            {"kind": "eval", "seconds": 50.0, "avg_at_k": 0.0, "success_P": [0]},
        ]
        resumed = [*stale[:2], pause[0], {**stale[2], "time": 904.0}]
        assert [seconds for _, seconds in reuse.clocked([*stale[:2], *pause, {**stale[2], "time": 954.0}])][-1] == 8.0
        written(tmp_path, f"teamtr-seed{seed}", fresh)
        written(tmp_path, f"naive_sequential-seed{seed}", resumed)
    plans = ["teamtr", "naive_sequential"]
    asked = {"runs": None, "model": "tiny", "stages": None, "set": [], "out": tmp_path}
    a = reuse.argparse.Namespace(**asked, plans=plans, seeds=[0, 1, 2])
    found = reuse.summary(reuse.runs_of(a), a.seeds)
    assert found["seeds"] == [0, 1], "seed 2 was never begun"
    assert found["levels"] == {"updates": 2, "tokens": 100, "seconds": 8.0}
    fresh, stale = found["table"]["teamtr"], found["table"]["naive_sequential"]
    assert [fresh[key]["mean"] for key in reuse.LEVELS] == pytest.approx([0.5, 0.25, (0.18 + 0.26) / 2])
    assert [stale[key]["mean"] for key in reuse.LEVELS] == pytest.approx([0.4, 0.4, 0.4])
    assert stale["tokens_minus_fresh"]["mean"] == pytest.approx(0.15)
    low, high = stale["tokens_minus_fresh"]["interval"]
    assert low < 0.1 < 0.2 < high, "two seeds say little"
    assert found["choices"]["naive_sequential"]["0"]["actions"] == {"reuse": 2}
    shown = reuse.text("words", found)
    assert "| naive_sequential | 10.0 | 40.0 (40.0 to 40.0) |" in shown
    assert "at 2 updates, 100 sampled tokens, 8 s of training" in shown


def test_a_plan_on_held_out_problems_has_an_interval_over_them(reuse):
    curve = [
        {"updates": 0, "success": 0.25, "units": [0.0, 0.5]},
        {"updates": 6, "success": 0.75, "units": [0.5, 1.0]},
    ]
    again = [{**point, "units": [0.0, 0.0]} for point in curve]
    assert reuse.sampled([curve, again], 3, "updates").tolist() == [0.125, 0.375]
    assert reuse.Estimate.of([0.125, 0.375]).interval[0] < 0.125


def test_runs_of_a_reproduced_table_are_read(reuse, tmp_path, monkeypatch, capsys):
    problems = {"problem_ids": ["a", "b"], "success_P": [0.0, 1.0], "avg_at_k": 0.5}
    for folder, tokens in {"teamtr-seed0": 300, "naive-once-a-stage-seed0": 100}.items():
        (tmp_path / "runs" / folder).mkdir(parents=True)
        update = {"kind": "update", "update": 1, "outcome": "accepted", "kl_upper": 0.0, "radius": 0.1, "time": 9.0}
        records = [
            {"kind": "start", "stages": 1, "time": 1.0},
            {"kind": "eval", **problems},
            {**update, "sampled_tokens_total": tokens},
            {"kind": "stage"},
            {"kind": "eval", **problems, "success_P": [1.0, 1.0], "avg_at_k": 1.0},
        ]
        log = tmp_path / "runs" / folder / "log.jsonl"
        log.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["reuse", "--runs", str(tmp_path), "--out", str(tmp_path), "--plans", "teamtr,naive_sequential"]
    monkeypatch.setattr(sys, "argv", [*words, "--seeds", "0"])
    reuse.main()
    assert "gsm8k, seeds 0: success in %, with intervals at 95 % over problems" in capsys.readouterr().out
    found = json.loads((tmp_path / "gsm8k.json").read_text())
    assert found["levels"]["tokens"] == 100
    assert found["table"]["naive_sequential"]["updates"]["mean"] == 1.0
    asked = reuse.argparse.Namespace(runs=tmp_path, plans=["teamtr"], seeds=[0])
    assert reuse.runs_of(asked)["teamtr"][0].finished


def test_the_plans_of_a_team_are_files_that_load(reuse):
    team = loads(reuse.team_file("tiny"), "team", ["plan.preset=partial"])
    assert team.plan.radius_nats_per_message == 0.1
    assert all(agent.train == "lora" for agent in team.team.agents)


@pytest.mark.slow
def test_a_game_in_words_is_trained_read_and_packed(reuse, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reuse, "AGENTS", 2)
    out = tmp_path / "out"
    small = ["plan.problems=2", "plan.group_size=2", "team.max_tokens=5", "device=cpu"]
    words = ["reuse", "--model", str(folder), "--out", str(out), "--plans", "teamtr,partial"]
    words += ["--seeds", "0", "--stages", "1", *(word for change in small for word in ("--set", change))]
    monkeypatch.setattr(sys, "argv", [*words, "--limit", "300"])
    reuse.main()
    found = json.loads((out / "words.json").read_text())
    assert found["failed"] == []
    assert found["levels"]["updates"] == 2
    assert found["table"]["teamtr"]["end"]["tokens"] > found["table"]["partial"]["end"]["tokens"]
    assert found["choices"]["partial"]["0"]["actions"] == {"sample": 1, "reuse": 1}
    capsys.readouterr()
    reuse.main()  # all have finished: nothing is started, the table is the same
    again = capsys.readouterr().out
    assert "has finished" not in again
    assert again == (out / "words.txt").read_text()
    elsewhere = tmp_path / "elsewhere"
    with tarfile.open(out / "words-logs.tar.gz") as logs:
        logs.extractall(elsewhere, filter="data")
    monkeypatch.setattr(sys, "argv", [str(elsewhere) if word == str(out) else word for word in words] + ["--read"])
    reuse.main()
    assert capsys.readouterr().out == again


def test_a_run_that_fails_says_why(reuse, tmp_path):
    beside = importlib.import_module("beside")
    broken = beside.Run(tmp_path / "broken", "name: x\n")
    [said] = beside.train([broken], limit=120)
    assert said.startswith("broken: exit code")
    assert 'missing key "team"' in said
    assert not broken.finished


def test_the_table_of_methods_is_what_the_store_says(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    results = importlib.import_module("results")
    figure = tmp_path / "results.svg"
    results.main(["--figure", str(figure)])
    printed = capsys.readouterr().out
    results.main(["--table", "ablation"])
    for table in (printed, capsys.readouterr().out):
        assert table in (ROOT / "docs" / "results.md").read_text()
    assert "Methods side by side" in figure.read_text()
    stored = results.load(results.STORE)
    results.save(stored, tmp_path / "again.json")
    assert results.load(tmp_path / "again.json") == stored
    rows = {row.line.name: row for row in results.rows_of(stored, "main-results")}
    assert rows["self-consistency"].accuracy == pytest.approx(100 * 124 / 200)
    assert sum(rows["self-consistency"].results[0].problems.values()) == 124, "the problems say the same"


def test_results_of_other_problems_or_several_answers_are_refused(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    results = importlib.import_module("results")
    one = results.Result("dapo", 0, 50.0, problems={"a": 1.0, "b": 0.0})
    two = results.Result("dapo", 1, 50.0, problems={"a": 1.0, "c": 0.0})
    with pytest.raises(SystemExit, match="different problems"):
        results.save({("dapo", 0): one, ("dapo", 1): two}, tmp_path / "store.json")
    half = results.Result("dapo", 0, 50.0, problems={"a": 0.5, "b": 0.5})
    with pytest.raises(SystemExit, match="one answer for each problem"):
        results.save({("dapo", 0): half}, tmp_path / "store.json")


def test_only_runs_that_were_evaluated_at_their_end_are_stored(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    results = importlib.import_module("results")
    setting = Setting(changes=("plan.stages=1", "plan.problems=2", "plan.group_size=2", "tiny.warmup_steps=5"))
    (cell,) = [cell for cell in cells_of(find("main-results"), setting, tmp_path) if cell.variant == "auto"]
    for _ in train(cell.team_file, cell.folder):
        pass
    (found,) = results.results_of(tmp_path)
    assert (found.variant, found.seed) == ("auto", 0)
    assert found.accuracy == pytest.approx(100 * sum(found.problems.values()) / len(found.problems))
    log = cell.folder / "log.jsonl"
    log.write_text("".join(line for line in log.open() if '"kind":"eval"' not in line or '"stage":0' in line))
    assert list(results.results_of(tmp_path)) == []
