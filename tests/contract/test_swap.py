"""Replacing an agent: what is aligned on what, how far it may be, and that everything else stays as it was."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from teamtr.chat.tokenizers import compare_tokenizers
from teamtr.config import load_team_file, loads
from teamtr.engines.torch.loading import TinyShape, tiny_model
from teamtr.engines.torch.tokenizer import character_tokenizer
from teamtr.errors import Refused, UserError
from teamtr.rollout import trained_returns_PG
from teamtr.session import train as runs
from teamtr.session.build import build
from teamtr.session.resume import StoredRun
from teamtr.store import RunFolder, StoreError, read_episodes
from teamtr.swap import Request, swap
from teamtr.swap.probes import Probes, joined, make_probes, problems_held_out, problems_to_train, split_rows
from teamtr.swap.strings import DIFFICULT, context_strings
from teamtr.theory.estimators import GroupAdvantage

pytestmark = pytest.mark.long

TEAM = """\
name: small
task: {name: code, symbols: ABC, held_out: 0.3, skill: 0.9}
tiny: {layers: 1, width: 32, heads: 2, warmup_steps: 15, warmup_learning_rate: 1e-2}
team:
  model: tiny
  agents:
    - {name: left, max_tokens: 2}
    - {name: right, max_tokens: 2}
    - {name: speaker, max_tokens: 3}
plan: {stages: 1, problems: 4, group_size: 4, radius_nats_per_message: 0.05}
learner: {minibatches: 2}
eval: {every: 0, samples: 4}
"""
PROBES = "swap-probes.jsonl.gz"
QUICK = {"probes": 96, "learning_rate": 3e-3, "batch": 32, "check_every": 10, "eval_samples": 2}


def train(folder: Path, *overrides: str) -> Path:
    for _ in runs.train(loads(TEAM, "small", overrides), folder):
        pass
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("swap") / "run")


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory) -> Path:
    """A larger model with other first weights, taught the form of the task's messages."""
    folder = tmp_path_factory.mktemp("swap") / "newcomer"
    session = build(loads(TEAM, "small", ["seed=7", "tiny.layers=2", "tiny.width=48", "tiny.warmup_steps=5"]))
    folder.mkdir()
    session.engine.learner("speaker").policy.save_weights(folder)
    return folder


@pytest.fixture(scope="module")
def aligned(run, newcomer, tmp_path_factory) -> tuple[Path, list[dict]]:
    out = tmp_path_factory.mktemp("swap") / "aligned"
    before = fingerprint(run)
    records = list(swap(run, Request("speaker", str(newcomer), train="full", **QUICK), out))
    assert fingerprint(run) == before, "the old run was touched"
    return out, records


def fingerprint(folder: Path) -> dict[str, str]:
    files = (f for f in sorted(folder.rglob("*")) if f.is_file())
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def probes_of(out: Path, **changes) -> tuple[Probes, object]:
    session, _ = StoredRun.read(out).build()
    settings = {"exact": True, "probes": 96, "held_out": 0.2, "seed": 0, **changes}
    return make_probes(
        [read_episodes(out / "episodes" / PROBES)], session.team["speaker"], session, **settings
    ), session


# -- an aligned swap ------------------------------------------------------------------------------------------


def test_the_new_agent_is_within_the_radius_on_probes_that_no_step_saw(aligned, run):
    """Measured again from the stored folders, with plain transformers and the textbook sum."""
    from transformers import AutoModelForCausalLM

    out, records = aligned
    found = records[-1]["alignment"]
    assert found["within_radius"] is True
    assert found["kl_upper"] <= found["radius"] == 0.05
    assert found["curve"][0]["kl"] > 4 * found["radius"], "nothing had to be aligned"
    probes, _ = probes_of(out)
    models = {}
    for which, folder in (("old", run), ("new", out)):
        store = RunFolder.read(folder).checkpoints
        models[which] = AutoModelForCausalLM.from_pretrained(store.folder_of(store.latest(), "speaker")).double()
    assert models["new"].config.hidden_size == 48
    kls = []
    for m in probes.held_out:
        prompt, message = probes.old.prompts[m], probes.old.messages[m]
        ids = torch.as_tensor(np.concatenate([prompt, message]), dtype=torch.long)[None]
        positions = slice(len(prompt) - 1, len(prompt) + len(message) - 1)
        with torch.no_grad():
            p, q = (models[which](ids).logits[0, positions].log_softmax(-1) for which in ("old", "new"))
        kls.append(float((p.exp() * (p - q)).sum()))
    assert found["held_out"] == len(kls)
    assert np.mean(kls) == pytest.approx(found["kl"], rel=1e-3)


def test_probes_are_not_tokens_sampled_for_training(aligned, run):
    out, _ = aligned
    before, after = (RunFolder.read(folder).checkpoints.latest().progress["account"] for folder in (run, out))
    assert after["episodes"] == before["episodes"]
    spent = {agent: phases["sampled"] for agent, phases in before["tokens"].items() if "sampled" in phases}
    assert {agent: phases["sampled"] for agent, phases in after["tokens"].items() if "sampled" in phases} == spent
    played = [read_episodes(file) for file in (out / "episodes").glob("swap-*.jsonl.gz")]
    tokens = sum(len(turn.token_ids) for batch in played for episode in batch.episodes for turn in episode.turns)
    probed = [sum(phases.get("probe", 0) for phases in account["tokens"].values()) for account in (before, after)]
    assert probed[1] - probed[0] == tokens > 0


def test_the_record_says_what_happened_and_that_it_is_not_certified(aligned, newcomer):
    out, records = aligned
    record = records[-1]
    logged = RunFolder.read(out).log.read()
    assert logged[-1] == json.loads(json.dumps(record))
    assert record["certified"] is False
    assert record["mode"] == "aligned"
    assert record["to"]["model"] == str(newcomer)
    assert set(record["success"]) == {"before", "at_swap", "after"}
    assert record["shock"] == pytest.approx(record["success"]["before"] - record["success"]["after"])
    assert record["direct_shock"] == pytest.approx(record["success"]["before"] - record["success"]["at_swap"])
    assert [r["kind"] for r in logged if r["kind"] == "update"] == ["update"] * 3, "the log goes on from the old one"
    compared = len(list(context_strings(read_episodes(out / "episodes" / PROBES)))) + DIFFICULT
    assert f"identical ids on {compared} strings" in record["protocol"]["items"][0]["note"]
    found = record["alignment"]
    assert np.isfinite(found["surrogate"])
    assert found["curve"][-1]["upper"] == found["kl_upper"], "the curve ends with what was installed"
    assert [look["step"] for look in found["curve"]] == list(range(0, found["steps"] + 1, 10))
    assert found["train_kl"] == found["curve"][-1]["train_kl"] <= found["radius"]
    assert found["unseen"]["messages"] > 0
    assert 0 <= found["unseen"]["kl"] <= found["unseen"]["kl_upper"]


def test_the_others_stay_as_they_were(aligned, run):
    out, _ = aligned
    old, new = (RunFolder.read(folder).checkpoints for folder in (run, out))
    for name in ("left", "right"):
        a, b = (store.folder_of(store.latest(), name) for store in (old, new))
        assert fingerprint(a) == fingerprint(b)
    assert not (out / "swap" / "align").exists()


def test_asked_again_a_finished_swap_only_tells(aligned, run, newcomer):
    out, records = aligned
    before = fingerprint(out)
    again = list(swap(run, Request("speaker", str(newcomer), train="full", **QUICK), out))
    assert again == [json.loads(json.dumps(records[-1]))]
    assert {k: v for k, v in fingerprint(out).items() if k != ".lock"} == {
        k: v for k, v in before.items() if k != ".lock"
    }


def test_the_look_that_steers_nothing_is_at_test_problems(aligned, run):
    out, records = aligned
    task = StoredRun.read(run).build()[0].task
    test, trained = ({problem.id for problem in task.problems(split)} for split in ("test", "train"))
    unseen = read_episodes(out / "episodes" / "swap-unseen.jsonl.gz")
    seen = {problem.id for problem in unseen.problems} | {episode.problem_id for episode in unseen.episodes}
    assert seen
    assert seen <= test
    assert seen.isdisjoint(trained)
    assert records[-1]["alignment"]["unseen"]["messages"] == len(unseen.of("speaker"))
    played = read_episodes(out / "episodes" / PROBES)
    assert {problem.id for problem in played.problems} <= trained, "the probes that steer are not of them"


def test_training_goes_on_and_certificates_with_it(aligned, tmp_path):
    out = tmp_path / "on"
    shutil.copytree(aligned[0], out)
    records = list(runs.train(load_team_file(out / "team.yaml"), out))
    assert records[0]["kind"] == "resume"
    updates = [r for r in records if r["kind"] == "update"]
    assert [(r["update"], r["stage"], r["agent"]) for r in updates] == [
        (4, 1, "left"),
        (5, 1, "right"),
        (6, 1, "speaker"),
    ]
    kept = [r for r in updates if r["outcome"] == "accepted"]
    assert kept
    assert all(r["certificates"] and r["kl_upper"] <= r["radius"] for r in kept)
    kinds = [r["kind"] for r in RunFolder.read(out).log.read()]
    assert kinds.count("swap") == 1, "the swap stays in the log"


def test_a_protocol_that_changes_with_the_swap(run, newcomer, tmp_path):
    """The team file says so from then on, and the checklist what the new agent is told."""
    from transformers import AutoTokenizer

    model = tmp_path / "wordy"
    shutil.copytree(newcomer, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    words = "{% if messages[0].role != 'system' %}<sys>hi{% endif %}"
    tokenizer.chat_template = words + tokenizer.chat_template + "{# <think> #}"
    tokenizer.save_pretrained(model)

    def swapped(name: str, **switches) -> tuple[dict, dict]:
        request = Request("speaker", str(model), mode="direct", train="full", **QUICK, **switches)
        *_, record = swap(run, request, tmp_path / name)
        items = {item["point"]: item for item in record["protocol"]["items"]}
        return items, load_team_file(tmp_path / name / "team.yaml").team.protocol.model_dump()

    items, protocol = swapped("loose", system="template")
    assert protocol == {"think": "keep", "tools": "off", "system": "template"}
    assert not items["system prompt"]["ok"]
    assert not items["reasoning tags"]["ok"]
    items, protocol = swapped("strict", think="strip", tools="canonical")
    assert protocol == {"think": "strip", "tools": "canonical", "system": "explicit"}
    assert items["system prompt"]["ok"]
    assert items["reasoning tags"]["ok"]
    assert items["tool calls"]["note"] == "one JSON form"


# -- other kinds of swap --------------------------------------------------------------------------------------


def test_a_direct_swap_installs_the_model_as_it_came(run, newcomer, tmp_path):
    from safetensors.torch import load_file

    *_, record = swap(run, Request("speaker", str(newcomer), mode="direct", train="full", **QUICK), tmp_path / "out")
    assert record["alignment"] is None
    assert record["shock"] == record["direct_shock"]
    store = RunFolder.read(tmp_path / "out").checkpoints
    installed = load_file(store.folder_of(store.latest(), "speaker") / "model.safetensors")
    came = load_file(newcomer / "model.safetensors")
    assert installed.keys() == came.keys()
    assert all(torch.equal(installed[k], came[k]) for k in came)


def test_a_reset_forgets_what_the_others_learnt(run, newcomer, tmp_path):
    *_, record = swap(run, Request("speaker", str(newcomer), mode="reset", train="full", **QUICK), tmp_path / "out")
    assert all(record["from"]["version"][n] != record["to"]["version"][n] for n in ("left", "right", "speaker"))
    assert set(record["success"]) == {"before", "at_swap"}


def test_full_to_lora(run, tmp_path):
    request = Request("speaker", "tiny", train="lora", max_steps=30, **{**QUICK, "learning_rate": 1e-2})
    *_, record = swap(run, request, tmp_path / "out")
    curve = [look["kl"] for look in record["alignment"]["curve"]]
    assert min(curve) < 0.7 * curve[0]
    store = RunFolder.read(tmp_path / "out").checkpoints
    assert (store.folder_of(store.latest(), "speaker") / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_lora_to_full_keeps_the_base_that_the_others_stand_on(newcomer, tmp_path):
    """The built-in base depends on who shares it: with one agent gone it would come out otherwise."""
    run = train(tmp_path / "run", "team.train=lora", "team.lora.rank=2", "plan.radius_nats_per_message=0.5")
    *_, record = swap(run, Request("speaker", str(newcomer), train="full", **QUICK), tmp_path / "out")
    old, new = record["from"]["version"], record["to"]["version"]
    assert (old["left"], old["right"]) == (new["left"], new["right"]), "versions name the base as well"
    assert record["alignment"]["within_radius"] is True
    records = list(runs.train(load_team_file(tmp_path / "out" / "team.yaml"), tmp_path / "out"))
    assert [r["update"] for r in records if r["kind"] == "update"] == [4, 5, 6]


def other_tokenizer():
    """The same characters with other ids."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    template = character_tokenizer()
    size = len(template)
    keep = {template.convert_ids_to_tokens(i): i for i in range(6)}
    characters = {template.convert_ids_to_tokens(i): size - 1 - (i - 6) for i in range(6, size)}
    core = Tokenizer(models.WordLevel({**keep, **characters}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=["<sys>", "<user>", "<bot>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template.chat_template
    return tokenizer


def test_other_ids_mean_text_and_no_radius(run, tmp_path):
    model, _ = tiny_model(TinyShape(layers=1, width=32, heads=2), seed=3)
    tokenizer = other_tokenizer()
    model.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    request = Request("speaker", str(tmp_path / "other"), train="full", max_steps=40, **QUICK)
    *_, record = swap(run, request, tmp_path / "out")
    assert record["protocol"]["exact_kl"] is False
    found = record["alignment"]
    assert found["loss"] == "cross_entropy"
    assert found["radius"] is None
    assert found["within_radius"] is None
    assert "no exact KL" in found["note"]
    curve = [look["kl"] for look in found["curve"]]
    assert min(curve) < 0.5 * curve[0]
    gap, (probes, _) = found["text_gap"], probes_of(tmp_path / "out", exact=False)
    letters = probes.characters_M[probes.held_out].mean()
    assert gap["nats_per_character"] == pytest.approx(gap["nats_per_message"] / letters)
    assert gap["nats_per_message"] < 0.5 * curve[0]  # sampled: with few messages it may even lie below zero


# -- parts ----------------------------------------------------------------------------------------------------


def test_probes_are_states_in_which_the_agent_speaks(aligned):
    out, _ = aligned
    probes, _ = probes_of(out)
    batch = read_episodes(out / "episodes" / PROBES)
    own = [t for e in batch.episodes for t in e.turns if t.agent == "speaker"]
    assert len(probes.old) == 96
    for m, turn in enumerate(own[:96]):
        assert (probes.old.messages[m] == turn.token_ids).all()
        assert (probes.new.prompts[m] == turn.context_ids).all(), "one template, one rendering"
    held = set(probes.old.cluster_M[probes.held_out])
    assert held.isdisjoint(probes.old.cluster_M[probes.train])
    assert len(probes.held_out) + len(probes.train) == 96


def test_more_probes_leave_what_is_held_out_alone(aligned):
    out, _ = aligned
    probes, session = probes_of(out)
    batch = read_episodes(out / "episodes" / PROBES)
    allowed = problems_to_train(batch, probes)
    held = {batch.problems[p].id for p in probes.old.problem_M[probes.held_out]}
    assert held
    assert held.isdisjoint(problem.id for problem in allowed)
    more = joined([batch, batch])
    assert len(more.episodes) == 2 * len(batch.episodes)
    settings = {"exact": True, "probes": 96, "held_out": 0.2, "seed": 0}
    grown = make_probes([batch, batch], session.team["speaker"], session, **settings)
    assert (grown.held_out == probes.held_out).all()
    assert grown.usual == probes.usual == len(probes.new)
    assert (grown.train[: len(probes.train)] == probes.train).all()
    assert len(grown.train) == len(probes.train) + len(batch.of("speaker"))
    for m in (0, len(probes.new) - 1):
        np.testing.assert_array_equal(grown.new.prompts[m], probes.new.prompts[m])


def test_more_probes_to_judge_by_are_all_held_out(aligned):
    out, _ = aligned
    probes, session = probes_of(out)
    batch = read_episodes(out / "episodes" / PROBES)
    judged = problems_held_out(batch, probes)
    assert {p.id for p in judged}.isdisjoint(p.id for p in problems_to_train(batch, probes))
    settings = {"exact": True, "probes": 96, "held_out": 0.2, "seed": 0}
    grown = make_probes([batch, batch], session.team["speaker"], session, judges=[batch], **settings)
    messages = len(batch.of("speaker"))
    assert len(grown.held_out) == len(probes.held_out) + messages
    assert (grown.held_out[-messages:] == np.arange(len(grown.new))[-messages:]).all()
    assert len(grown.train) == len(probes.train) + messages


def test_probes_respelt(aligned):
    out, _ = aligned
    probes, session = probes_of(out, exact=False)
    codec = session.context.codecs["speaker"]
    for old, new in zip(probes.old.messages, probes.new.messages, strict=True):
        assert codec.decode(old) == codec.decode(new)


@pytest.mark.parametrize(("cluster", "held"), [([0, 0, 1, 1, 2, 2, 3, 3, 4, 4], 2), ([5] * 10, 2), ([0, 1], 1)])
def test_a_fifth_is_held_out(cluster, held):
    mask = split_rows(np.array(cluster), 0.2, np.random.default_rng(0))
    assert mask.sum() == held


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("cluster", [[5, 5], [5] * 10, [0, 1], [0, 0, 1]])
def test_something_is_held_out_and_something_is_left_to_learn_from(cluster, share):
    mask = split_rows(np.array(cluster), share, np.random.default_rng(0))
    assert 0 < mask.sum() < len(cluster)


# -- tokenizers -----------------------------------------------------------------------------------------------


def test_where_tokenizers_differ():
    found = compare_tokenizers(character_tokenizer(), other_tokenizer(), ["<bot>AB", "<bot>"])
    assert not found.identical
    assert (found.same, found.strings) == (1, 2)
    assert found.differences[0].position == 1, "the marker is the same, the letter after it is not"
    assert found.differences[0].ids_a != found.differences[0].ids_b


# -- refusals -------------------------------------------------------------------------------------------------


def test_neither_into_the_run_nor_around_it(run, newcomer, tmp_path):
    """Not by a link either; a neighbour whose name begins alike is another folder."""
    before, around = fingerprint(run), set(run.parent.iterdir())
    (tmp_path / "link").symlink_to(run)
    for out in (run, run / "inside", run / "checkpoints" / "deep", tmp_path / "link" / "inside", run.parent):
        with pytest.raises(UserError, match="another folder"):
            list(swap(run, Request("speaker", str(newcomer)), out))
    assert fingerprint(run) == before
    assert set(run.parent.iterdir()) == around
    neighbour = run.with_name(run.name + "2")
    with pytest.raises(UserError, match="no such folder"):
        list(swap(run, Request("speaker", "./nowhere"), neighbour))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("learning_rate", rate) for rate in (float("nan"), float("inf"), 0.0, -1e-3)),
        *(("held_out", share) for share in (float("nan"), 0.0, 1.0)),
        ("probes", 1),
        ("batch", 0),
        ("check_every", 0),
        ("max_steps", 0),
        ("doublings", -1),
    ],
)
def test_numbers_that_mean_nothing_are_refused(field, value):
    with pytest.raises(UserError, match=f"--{field.replace('_', '-')} "):
        Request("speaker", "tiny", **{field: value})


def test_what_cannot_be_swapped(run, newcomer, aligned, tmp_path):
    with pytest.raises(UserError, match=r"no agent 'nobody'.*left, right, speaker"):
        list(swap(run, Request("nobody", str(newcomer)), tmp_path / "a"))
    with pytest.raises(UserError, match="no such folder"):
        list(swap(run, Request("speaker", "./nowhere"), tmp_path / "b"))
    with pytest.raises(Refused, match=r"another swap \(agent"):
        list(swap(run, Request("left", str(newcomer), train="full", **QUICK), aligned[0]))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "team.yaml").write_text(TEAM)
    with pytest.raises(Refused, match="holds a run already"):
        list(swap(run, Request("speaker", str(newcomer)), tmp_path / "other"))


def test_a_swap_does_not_go_on_with_another_model_in_the_same_folder(run, newcomer, tmp_path):
    """What was measured and aligned before was of the model that it began with."""
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(newcomer, model)
    request = Request("speaker", str(model), mode="direct", train="full", **QUICK)
    begun = swap(run, request, out)
    assert [next(begun)["kind"] for _ in range(3)] == ["protocol", "swap_eval", "swap_eval"]
    begun.close()
    session = build(loads(TEAM, "small", ["seed=8", "tiny.layers=2", "tiny.width=48", "tiny.warmup_steps=5"]))
    session.engine.learner("speaker").policy.save_weights(model)
    with pytest.raises(Refused, match="weights that it began with"):
        list(swap(run, request, out))
    shutil.copytree(newcomer, model, dirs_exist_ok=True)
    kept = (out / "swap" / "model.json").read_bytes()
    (out / "swap" / "model.json").write_bytes(kept[:-9])
    with pytest.raises(StoreError, match=r"model\.json is damaged"):
        list(swap(run, request, out))
    (out / "swap" / "model.json").write_bytes(kept)
    assert list(swap(run, request, out))[-1]["kind"] == "swap", "the model is back as it was"


def test_a_swap_begins_its_stage_with_nothing_carried_over(newcomer, tmp_path):
    """Weights that carried the last stage's rollouts mean nothing to the next one's."""
    source = train(tmp_path / "probed", "diagnostics.every=1")
    stored = RunFolder.read(source).checkpoints.latest()
    assert stored.progress["carried"] is not None
    for _ in swap(source, Request("speaker", str(newcomer), train="full", mode="direct", **QUICK), tmp_path / "new"):
        pass
    progress = RunFolder.read(tmp_path / "new").checkpoints.latest().progress
    kept = {"stage", "done", "number", "account", "versions", "precisions", "references", "states", "history", "inputs"}
    assert {key: value for key, value in progress.items() if key not in kept and value is not None} == {}


def test_the_team_is_evaluated_after_a_swap_though_the_old_one_was_at_the_same_stage(tmp_path):
    """Otherwise the checkpoint of the swap could not be the best one."""
    old, out = train(tmp_path / "old", "eval.every=1"), tmp_path / "out"
    list(swap(old, Request("speaker", "tiny", mode="direct", probes=16, eval_samples=2), out))
    records = list(runs.train(load_team_file(out / "team.yaml"), out))
    evaluated = [(r["stage"], r["updates"]) for r in records if r["kind"] == "eval"]
    assert evaluated == [(1, 3), (2, 6)]
    stored = RunFolder.read(out).checkpoints.latest().progress["history"]["held_out"]
    assert [found["updates"] for found in stored] == [3]


def test_a_swap_weighs_rewards_as_the_plan_does(run, newcomer, tmp_path, monkeypatch):
    """Its surrogate takes advantages without their group's deviation where the plan does."""
    asked = []

    def watched(self, returns_PG, weights_PG=None):
        asked.append(self.normalize)
        return estimate(self, returns_PG, weights_PG)

    source = train(tmp_path / "plain", "plan.preset=no_normalization")
    estimate = GroupAdvantage.estimate
    monkeypatch.setattr(GroupAdvantage, "estimate", watched)
    for _ in swap(source, Request("speaker", str(newcomer), train="full", max_steps=10, **QUICK), tmp_path / "new"):
        pass
    assert set(asked) == {False}


def test_the_surrogate_of_a_swap_is_of_the_returns_that_the_plan_trains_on(newcomer, tmp_path, monkeypatch):
    """A plan that punishes long messages punishes them in the advantages, too."""
    asked = []

    def watched(self, returns_PG, weights_PG=None):
        asked.append(returns_PG)
        return estimate(self, returns_PG, weights_PG)

    source, out = train(tmp_path / "punished", "plan.overlong_cache=0.5"), tmp_path / "out"
    estimate = GroupAdvantage.estimate
    monkeypatch.setattr(GroupAdvantage, "estimate", watched)
    list(swap(source, Request("speaker", str(newcomer), train="full", max_steps=10, **QUICK), out))
    session, team = StoredRun.read(source).build()
    batch = read_episodes(out / "episodes" / PROBES)
    trained_PG = trained_returns_PG(batch, session.plan, team.limits)
    assert (trained_PG < batch.returns_PG(1.0)).any(), "nobody was punished"
    np.testing.assert_array_equal(asked[-1], trained_PG)


# -- a plan with a reference policy ---------------------------------------------------------------------------


def test_after_a_swap_everyone_has_the_reference_of_its_own_beginning(newcomer, tmp_path):
    """The kept agents that of the old run, though their built-in base had been made from the examples of all three; the
    new one its own model."""
    old = train(tmp_path / "old", "plan.preset=grpo")
    out = tmp_path / "out"
    list(swap(old, Request("speaker", str(newcomer), mode="direct", train="full", **QUICK), out))
    before, after = (RunFolder.read(folder).checkpoints.latest().progress["references"] for folder in (old, out))
    assert set(before) == set(after) == {"left", "right", "speaker"}
    assert (after["left"], after["right"]) == (before["left"], before["right"])
    began = build(load_team_file(out / "team.yaml")).engine
    assert after["speaker"] == began.learner("speaker").version() != before["speaker"]
    records = list(runs.train(load_team_file(out / "team.yaml"), out))
    updates = [r for r in records if r["kind"] == "update"]
    assert [r["agent"] for r in updates] == ["left", "right", "speaker"]
    assert all(r["kl_reference"] is not None for r in updates if r["outcome"] == "accepted")
    moved = {r["agent"]: r["kl_reference"] for r in updates}
    assert moved["left"] > 0, "it was trained before the swap, and is measured from where it began"
