"""A worker that holds a part of every layer reads that part and no more, and computes what it would with the whole."""

from __future__ import annotations

import copy
import gc
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import part_calls
from forked import in_ranks
from teamtr.config import load_team_file, loads
from teamtr.engines.shards import Shards
from teamtr.engines.torch.model_files import INDEX, WEIGHTS, ModelError
from teamtr.engines.torch.outline import NotInParts, Unread, slots_of
from teamtr.engines.torch.policy import TransformerPolicy
from teamtr.engines.torch.pretrained import load_outline, load_pretrained
from teamtr.engines.torch.spread_linears import round_again_on_the_way_back
from teamtr.engines.torch.tokenizer import character_tokenizer
from teamtr.errors import UserError
from teamtr.session.build import Parts, build
from teamtr.session.models import Models

TEAM = """
name: parts
task: {name: code, half_length: 1}
team:
  model: MODEL
  max_tokens: 4
  lora: {rank: 1}
  agents: [{name: left, train: lora}, {name: right, train: full}, {name: speaker, train: full}]
plan: {problems: 2, group_size: 2}
cluster: {engine: ray, workers: 2, shards: 3, shard_base: true}
"""
LAYERS = 4
SIZES = ("loading", "kept", "resuming")
TARGETS = {"left": "[q_proj, v_proj]", "right": "[v_proj, q_proj]", "speaker": "all-linear"}


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In half precision, with a head of its own, in several files with an index."""
    folder = tmp_path_factory.mktemp("untied")
    stored_model(folder, tied=False).to(torch.bfloat16).save_pretrained(folder, max_shard_size="60KB")
    assert (folder / INDEX).is_file()
    return folder


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tied")
    stored_model(folder, tied=True).save_pretrained(folder)
    return folder


def stored_model(folder: Path, *, tied: bool) -> Qwen3ForCausalLM:
    tokenizer = character_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=100,  # whose rows three ranks do not share evenly
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    return Qwen3ForCausalLM(config)


def read(folder: Path) -> Any:
    """The model, made without weights and then filled from its files."""
    found = load_outline(str(folder))
    assert all(parameter.isnan().all() for parameter in found.model.parameters()), "nothing was read yet"
    Unread(slots_of(found.model), found.stored).read(torch.device("cpu"))
    return found.model


def require_same(ours: Any, theirs: Any) -> None:
    names = list(theirs.state_dict())
    assert list(ours.state_dict()) == names
    for name, tensor in [*theirs.state_dict().items(), *theirs.named_buffers()]:
        own = ours.get_parameter_or_buffer(name)
        assert (own.dtype, own.stride()) == (tensor.dtype, tensor.stride()), name
        assert torch.equal(own, tensor), name
    assert [len(list(model.parameters())) for model in (ours, theirs)] == [len(list(theirs.parameters()))] * 2, "ties"
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.generation_config == theirs.generation_config
    assert ours.name_or_path == theirs.name_or_path
    assert not ours.training


# -- what is read ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_model_that_is_filled_from_its_files_is_the_one_that_transformers_loads(untied: Path, tied: Path) -> None:
    for folder in (untied, tied):
        require_same(read(folder), load_pretrained(str(folder))[0])


@pytest.mark.long
def test_agents_with_adapters_on_the_same_layers_are_checked_once(tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str | None] = []
    check = TransformerPolicy._check
    monkeypatch.setattr(TransformerPolicy, "_check", lambda policy: (checked.append(policy.adapter), check(policy)))
    agents = "".join(f"{{name: {name}, lora: {{rank: 1, targets: {t}}}}}, " for name, t in TARGETS.items())
    text = f"name: once\ntask: {{name: code}}\nteam: {{model: {tied}, train: lora, agents: [{agents}]}}"
    session = build(loads(text + "\ndevice: cpu\nsampling: {engine: plain}"))
    assert checked == ["agent0", "agent2"]
    policies = [session.engine.learner(name).policy for name in TARGETS]
    assert len({(policy.packs, policy._pads, policy.end_ids, policy.sampling_path) for policy in policies}) == 1


def test_so_is_one_whose_tensors_have_other_names_in_the_files(tied: Path, tmp_path: Path) -> None:
    """Of a decoder that was saved without its head; the loader puts the prefix back."""
    folder = Path(shutil.copytree(tied, tmp_path / "model"))
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    assert "norm.weight" in tensors
    require_same(read(folder), load_pretrained(str(folder))[0])


def test_weights_that_the_loader_converts_are_not_read_in_parts(tmp_path: Path) -> None:
    """Experts are stored one by one and computed with as one tensor."""
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=1,
        num_experts=2, num_experts_per_tok=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        decoder_sparse_step=1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    assert any("experts.1." in name for name in load_file(tmp_path / WEIGHTS))
    with pytest.raises(NotInParts, match=r"transformers converts its weights.+experts"):
        load_outline(str(tmp_path))


def test_nor_are_weights_that_are_stored_twice_and_tied(tied: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tied, tmp_path / "model"))
    tensors = load_file(folder / WEIGHTS)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1.0
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(NotInParts, match=r"its config ties lm_head.weight to model.embed_tokens.weight"):
        load_outline(str(folder))


def test_what_is_wrong_with_a_model_is_told_as_ever(tied: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tied, tmp_path / "model"))
    tensors = load_file(folder / WEIGHTS)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelError, match=r"is not whole: model\.safetensors comes without model\.norm\.weight"):
        load_outline(str(folder))
    save_file({**tensors, "model.norm.weight": norm[:-1].clone()}, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.norm\.weight of shape \(47,\) instead of \(48,\)"):
        load_outline(str(folder))
    save_file({**tensors, "model.norm.weight": norm / 0.0}, folder / WEIGHTS, {"format": "pt"})
    found = load_outline(str(folder))
    Unread(slots_of(found.model), found.stored).read(torch.device("cpu"))
    with pytest.raises(ModelError, match=r"not finite numbers \(model\.norm\.weight in model\.safetensors\)"):
        found.require_finite(found.model.state_dict())


# -- in half precision -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_that_rounds_in_passing_is_what_autocast_computes_and_keeps_no_rounded_weight(
    bias: bool,
) -> None:
    torch.manual_seed(0)
    theirs = torch.nn.Linear(16, 24, bias=bias)
    ours = copy.deepcopy(theirs)
    round_again_on_the_way_back(ours)
    x, found = torch.randn(1, 5, 16), []
    for layer in (theirs, ours):
        given, kept = x.clone().requires_grad_(), []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t)
        with torch.autocast("cpu", dtype=torch.float16), hooks:
            out = layer(given)
        out.backward(torch.linspace(-1.0, 1.0, out.numel()).view_as(out).half())
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias)), (
            "as ever without autocast"
        )
        weights = [t for t in kept if t.numel() == 16 * 24]
        found.append(([out, given.grad, *(p.grad for p in layer.parameters())], weights))
    for a, b in zip(found[0][0], found[1][0], strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a, b)
    assert [t.dtype for t in found[0][1]] == [torch.float16], "which autocast keeps"
    assert [t.data_ptr() for t in found[1][1]] == [ours.weight.data_ptr()]


# -- over ranks --------------------------------------------------------------------------------------------------


def ranks_of(world: int, how: str, team: Path, out: Path) -> list[dict[str, np.ndarray]]:
    out.mkdir()
    in_ranks(part_calls.one_rank, world, how, team, out)
    return [dict(np.load(out / f"{rank}.npz")) for rank in range(world)]


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.long
def test_ranks_that_read_their_parts_compute_what_they_did_with_the_whole_and_never_hold_it(untied, tmp_path):
    """Three of them, over whose number rows do not come out even; adapters on a base, and two models of their own."""
    team = tmp_path / "team.yaml"
    team.write_text(TEAM.replace("MODEL", str(untied)))
    in_parts, whole = (ranks_of(3, how, team, tmp_path / how) for how in ("parts", "whole"))
    alone = part_calls.computed(part_calls.engine_of(load_team_file(team), Shards(3)), tmp_path / "alone")
    for rank, other in zip(in_parts, whole, strict=True):
        for name, value in rank.items():
            if name in SIZES:
                continue
            np.testing.assert_array_equal(value, other[name], err_msg=name)
            if name.startswith("left") or name.endswith(("info", "sampled", "begin")):  # sums of the others round so
                np.testing.assert_array_equal(value, alone[name], err_msg=name)
    for file in sorted((tmp_path / "whole" / "saved").rglob("*.*")):
        same = tmp_path / "parts" / "saved" / file.relative_to(tmp_path / "whole" / "saved")
        assert same.read_bytes() == file.read_bytes(), file.name

    model, _ = load_pretrained(str(untied))
    layer = sum(4 * p.numel() for p in model.model.layers[0].parameters())
    outside = sum(4 * p.numel() for p in model.parameters()) - LAYERS * layer
    part = LAYERS * layer / 3 + outside
    for rank, other in zip(in_parts, whole, strict=True):
        assert rank["kept"] < 1.1 * 3 * part, "three models; rows that do not come out even, and adapters"
        assert rank["loading"] < rank["kept"] + 3 * layer, "some of which is whole while it is looked at"
        assert other["loading"] > other["kept"] + LAYERS * layer, "which would be seen"
        assert rank["resuming"] < rank["kept"] + 1.1 * 2 * 2 * part, "the moments of two models"


def test_garbage_is_not_looked_for_while_a_team_is_built(tied: Path) -> None:
    """And is again afterwards, whatever came of it."""
    seen: list[bool] = []

    def refuse(*_: object, **__: object) -> Models:
        seen.append(gc.isenabled())
        raise UserError("a test says so")

    agents = "[{name: left}, {name: right}, {name: speaker}]"
    team_file = loads(f"name: once\ntask: {{name: code}}\nteam: {{model: {tied}, agents: {agents}}}")
    assert gc.isenabled()
    with pytest.raises(UserError, match="a test says so"):
        build(team_file, parts=Parts(make_engine=refuse))
    assert gc.isenabled()
    gc.disable()
    try:
        with pytest.raises(UserError, match="a test says so"):
            build(team_file, parts=Parts(make_engine=refuse))
        assert not gc.isenabled(), "who switched it off keeps it off"
    finally:
        gc.enable()
    assert seen == [False, False]
