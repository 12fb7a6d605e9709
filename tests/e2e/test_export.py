"""Agents out of a team, as a person or a script does it: folders that others load, serve and share."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from called import invoke, last_json
from teamtr.config import load_team_file, loads
from teamtr.engines.torch.loading import TinyShape, tiny_model
from teamtr.session import train as runs
from teamtr.session.export import export
from teamtr.session.exported import Exported, vllm_lines
from teamtr.session.resume import StoredRun
from teamtr.store import RunFolder

TEAM = """\
name: small
task: {name: code, symbols: AB, held_out: 0.5, skill: 0.9}
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 10, warmup_learning_rate: 1e-2}
team:
  model: tiny
  agents:
    - {name: left, max_tokens: 2}
    - {name: right, max_tokens: 2, train: lora, lora: {rank: 2}}
    - {name: speaker, max_tokens: 3, train: lora, lora: {rank: 9}}
plan: {stages: 1, problems: 2, group_size: 4, radius_nats_per_message: 0.05}
learner: {minibatches: 1}
eval: {every: 1, samples: 2}
"""
IDS = torch.tensor([[3, 40, 41, 4, 42]])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    for _ in runs.train(loads(TEAM, "small"), folder):
        pass
    return folder


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("export") / "out"
    return out, last_json(invoke("export", run, out, "--json"))


def logits_of(run: Path, agent: str) -> np.ndarray:
    """What the run's own policy computes."""
    session, _ = StoredRun.read(run).build()
    policy = session.engine.learner(agent).policy
    with torch.no_grad():
        return policy.head()(policy._body(input_ids=IDS).last_hidden_state[0]).numpy()


@pytest.mark.long
def test_a_whole_model_loads_in_plain_transformers(exported, run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, told = exported
    forms = {a["agent"]: a["form"] for a in told["agents"]}
    assert forms == {"left": "model", "right": "adapter", "speaker": "adapter"}
    model = AutoModelForCausalLM.from_pretrained(out / "left")
    wanted = logits_of(run, "left")
    with torch.no_grad():
        np.testing.assert_allclose(model(IDS).logits[0].numpy(), wanted, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(out / "left")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "A"}], tokenize=False) == "<user>A"
    assert not {f.name for f in (out / "left").iterdir()} & {"optimizer.safetensors", "state.json", "manifest.json"}


@pytest.mark.long
def test_an_earlier_checkpoint_is_exported_too(run, tmp_path, monkeypatch):
    read, real = [], StoredRun.read

    def noted(folder, checkpoint=None):
        read.append(real(folder, checkpoint))
        return read[-1]

    monkeypatch.setattr("teamtr.session.export.StoredRun.read", noted)
    for asked, number in (("2", 2), ("best", 0), (None, 3)):  # nothing is learned: the first is as good as any
        given = [] if asked is None else ["--checkpoint", asked]
        invoke("export", run, tmp_path / str(asked), "--agent", "right", *given)
        assert read[-1].commit.number == number
    refused = invoke("export", run, tmp_path / "no", "--checkpoint", 77, code=2).stderr
    assert "no checkpoint 77; it holds 0, 2, 3" in refused


@pytest.mark.long
def test_an_adapter_loads_in_plain_peft_and_merges_to_the_same(exported, run, tmp_path):
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    out, _ = exported
    wanted = logits_of(run, "right")
    adapted = AutoPeftModelForCausalLM.from_pretrained(out / "right")
    told = last_json(invoke("export", run, tmp_path / "merged", "--merged", "--json"))
    assert {a["agent"]: a["form"] for a in told["agents"]} == {"left": "model", "right": "merged", "speaker": "merged"}
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged" / "right")
    with torch.no_grad():
        np.testing.assert_allclose(adapted(input_ids=IDS).logits[0].numpy(), wanted, atol=1e-5)
        np.testing.assert_allclose(merged(IDS).logits[0].numpy(), wanted, atol=1e-5)
        bare = AutoModelForCausalLM.from_pretrained(out / "base")(IDS).logits[0].numpy()
    assert np.abs(bare - wanted).max() > 1e-4, "the adapter changes something"


IN_HALF = """\
name: half
task: {name: data, path: rows.jsonl, grader: 'python:reward.py:reward'}
team:
  model: model
  max_tokens: 3
  agents: [{name: left, train: full}, {name: right, train: lora, lora: {rank: 2}}, {name: speaker, frozen: true}]
plan: {stages: 1, problems: 2, group_size: 4, radius_nats_per_message: 0.5}
eval: {every: 0}
"""


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("model*.safetensors"))


@pytest.mark.long
def test_what_came_in_half_precision_leaves_in_it(tmp_path: Path) -> None:
    """Training is in float32, and so are checkpoints; what is exported is as large as what was given."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = tiny_model(TinyShape(layers=1, width=16, heads=2), seed=1)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "team.yaml").write_text(IN_HALF)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"question": f"say {c}"}) + "\n" for c in "abcdefgh"))
    (tmp_path / "reward.py").write_text(
        "def reward(completions, **_):\n    return [float(len(set(c))) for c in completions]\n"
    )
    run = tmp_path / "run"
    for _ in runs.train(load_team_file(tmp_path / "team.yaml"), run):
        pass
    export(run, tmp_path / "out", form="merged")
    given = bytes_of(tmp_path / "model")
    for agent in ("left", "right", "speaker"):
        assert abs(bytes_of(tmp_path / "out" / agent) - given) < 200, "a header may differ"
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / agent)
        assert loaded.dtype == torch.bfloat16
        wanted, found = logits_of(run, agent), loaded.float()(IDS).logits[0].detach().numpy()
        moved = float(np.abs(found - wanted).max())
        assert moved == 0 if agent == "speaker" else 0 < moved < 0.05, "what was trained is rounded once"
    stored = StoredRun.read(run)
    kept = load_file(stored.folder.checkpoints.folder_of(stored.commit, "left") / "model.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    assert "bfloat16" in (tmp_path / "out" / "left" / "README.md").read_text()


@pytest.mark.long
def test_llama_cpp_knows_every_weight_of_what_is_exported_for_it(exported, run, tmp_path):
    gguf = pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM

    out = tmp_path / "gguf"
    told = last_json(invoke("export", run, out, "--gguf", "--json"))
    assert {a["form"] for a in told["agents"]} == {"gguf"}
    for agent in ("left", "right"):
        folder = out / agent
        settings = json.loads((folder / "config.json").read_text())
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[settings["model_type"].upper()], settings["num_hidden_layers"])
        weights = load_file(folder / "model.safetensors")
        assert weights
        for name, tensor in weights.items():
            assert tensor.dtype == torch.bfloat16
            assert names.get_name(name, try_suffixes=(".weight", ".bias")) is not None, name
        assert (folder / "tokenizer.json").exists()
        assert settings["architectures"]
        assert "convert_hf_to_gguf.py" in (folder / "README.md").read_text()
        with torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            np.testing.assert_allclose(model(IDS).logits[0].numpy(), logits_of(run, agent), atol=0.05)


def test_the_card_states_base_task_team_radius_figures_and_limits(exported, run):
    out, _ = exported
    card = (out / "right" / "README.md").read_text()
    evals = [r for r in RunFolder.read(run).log.read() if r["kind"] == "eval"]
    for words in (
        "library_name: peft",
        "the built-in tiny model (LoRA)",
        "| task | code |",
        "left (tiny, full), right (tiny, lora), speaker (tiny, lora)",
        "0.05 nats per message",
        "of 1 |",
        f"{100 * evals[-1]['avg_at_k']:.1f} %",
        "after 3 updates",
        "## Limits",
        "measured on held-out problems of it alone",
        'from_pretrained("THIS_FOLDER/../base")',
    ):
        assert words in card, words
    team = (out / "README.md").read_text()
    for words in (
        "# small",
        "| left | `left` | Hugging Face model |",
        "| plan | teamtr, seed 0 |",
        "## Limits",
        "after 3 updates",
    ):
        assert words in team, words


def test_the_start_line_names_every_adapter_where_it_is(exported):
    """What ``make test-vllm`` starts a server with."""
    out, told = exported
    whole, shared = map(shlex.split, told["serve"])
    assert whole == ["vllm", "serve", str(out / "left"), "--served-model-name", "left"]
    assert shared[:3] == ["vllm", "serve", str(out / "base")]
    assert shared[shared.index("--max-lora-rank") + 1] == "16", "the least room of vLLM's for rank 9"
    modules = dict(word.split("=", 1) for word in shared[shared.index("--lora-modules") + 1 :])
    assert modules.keys() == {"right", "speaker"}
    for agent, folder in modules.items():
        assert json.loads((Path(folder) / "adapter_config.json").read_text())["r"] == {"right": 2, "speaker": 9}[agent]
    card = (out / "README.md").read_text()
    assert "vllm serve ./base --enable-lora --max-lora-rank 16 --max-loras 2 --lora-modules right=./right" in card


def test_a_server_for_each_base_and_revision(tmp_path):
    made = [
        Exported("a", tmp_path / "a b", "adapter", "org/one", None, 8),
        Exported("b", tmp_path / "b", "adapter", "org/two", "v1", 3),
        Exported("c", tmp_path / "c", "adapter", "org/one", None, 33),
    ]
    first, second = map(shlex.split, vllm_lines(made))
    assert first[2] == "org/one"
    assert first[first.index("--max-lora-rank") + 1] == "64"
    assert first[-2:] == [f"a={tmp_path / 'a b'}", f"c={tmp_path / 'c'}"]
    assert second[2:5] == ["org/two", "--revision", "v1"]


@pytest.mark.long
def test_an_agent_that_is_called_base_keeps_its_folder(tmp_path):
    text = """
name: small
task: {name: sums}
team: {model: tiny, train: lora, max_tokens: 3, agents: [{name: base}, {name: speaker}]}
tiny: {layers: 1, width: 16, heads: 2, warmup_steps: 0}
plan: {stages: 1, problems: 2, group_size: 4, radius_nats_per_message: 0.05}
eval: {every: 0}
"""
    for _ in runs.train(loads(text, "small"), tmp_path / "run", stop=lambda: True):
        pass
    written = {each.agent: each for each in export(tmp_path / "run", tmp_path / "out")}
    assert (tmp_path / "out" / "base" / "adapter_config.json").exists()
    assert written["base"].base == written["speaker"].base == str(tmp_path / "out" / "base1")
    assert (tmp_path / "out" / "base1" / "config.json").exists()


@pytest.mark.long
def test_export_refuses(run, exported, tmp_path):
    out, _ = exported
    for arguments, words in (
        ((out,), "not an empty folder"),
        ((tmp_path / "x", "--agent", "nobody"), "left, right, speaker"),
        ((tmp_path / "x", "--agent", "left", "--adapter"), "is a whole model"),
        ((tmp_path / "x", "--adapter"), "is a whole model"),
        ((tmp_path / "x", "--gguf", "--merged"), "choose one"),
        ((tmp_path / "x", "--public"), "--push USER/NAME"),
    ):
        assert words in invoke("export", run, *arguments, code=2).stderr
        assert not (tmp_path / "x").exists()


class Hub:
    """What of the hub's client is used."""

    uploads: ClassVar[dict[str, set[str]]] = {}
    private: ClassVar[list[bool]] = []
    refuses: ClassVar[Exception | None] = None

    def __init__(self, token: str | None = None) -> None:
        pass

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        if self.refuses:
            raise self.refuses
        self.private.append(private)

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> str:
        self.uploads[repo_id] = {p.name for p in Path(folder_path).iterdir()}
        return f"hub/{repo_id}"


@pytest.mark.long
def test_pushing(run, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "uploads", {})
    monkeypatch.setattr(Hub, "private", [])
    said = invoke("export", run, tmp_path / "a", "--push", "me/team", code=2).stderr
    assert "not on the hub" in said
    assert "--merged" in said
    assert not Hub.uploads, "nobody is pushed where one cannot be"
    assert (tmp_path / "a" / "left").exists()
    told = last_json(invoke("export", run, tmp_path / "b", "--merged", "--push", "me/team", "--json"))
    assert told["pushed"] == {name: f"hub/me/team-{name}" for name in ("left", "right", "speaker")}
    assert all({"README.md", "config.json", "model.safetensors"} <= files for files in Hub.uploads.values())
    invoke("export", run, tmp_path / "c", "--agent", "left", "--push", "me/left", "--public")
    assert "me/left" in Hub.uploads
    assert Hub.private == [True, True, True, False]
    for kind in (OSError, type("ConnectError", (Exception,), {})):  # the second: of the hub's HTTP client, no OSError
        monkeypatch.setattr(Hub, "refuses", kind("no route to host\nand more"))
        out = tmp_path / kind.__name__
        said = invoke("export", run, out, "--agent", "left", "--push", "me/left", code=2).stderr
        assert "no route to host" in said
        assert "HF_TOKEN" in said
        assert (out / "config.json").exists(), "what was exported stays"
