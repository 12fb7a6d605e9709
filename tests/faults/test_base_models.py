"""A base model is whole or refused: every tensor as it is stored, from safetensors, and no code that came with it."""

from __future__ import annotations

import ast
import json
import logging
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import RevisionNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTJConfig, GPTJForCausalLM, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from teamtr import Agent, TeamTrainer, UserError
from teamtr.cli import app
from teamtr.config import ConfigError, loads
from teamtr.engines.stored import Reader
from teamtr.engines.torch.loading import TinyShape, quieten, tiny_model
from teamtr.engines.torch.model_files import INDEX, WEIGHTS, ModelError
from teamtr.engines.torch.pretrained import (
    load_outline,
    load_pretrained,
    load_tokenizer,
    require_finite,
    require_source,
)
from teamtr.engines.torch.tokenizer import character_tokenizer

NORM = "model.norm.weight"
TEAM = """\
name: small
task: {name: sums}
team: {model: %s, agents: [{name: left, max_tokens: 2}]}
plan: {stages: 1, problems: 2, group_size: 2}
"""


ROWS = [{"prompt": letter} for letter in "abcd"]


@pytest.fixture(autouse=True)
def _no_progress_bars() -> None:
    quieten()


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, whose head is its embedding and is not stored."""
    folder = tmp_path_factory.mktemp("tied")
    for part in tiny_model(TinyShape(1, 32, 2), seed=0):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head of its own, in several files with an index."""
    folder = tmp_path_factory.mktemp("untied")
    tokenizer = character_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder, max_shard_size="30KB")
    tokenizer.save_pretrained(folder)
    assert (folder / INDEX).is_file()
    return folder


@pytest.fixture
def folder(tied: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(tied, tmp_path / "model"))


@pytest.fixture
def sharded(untied: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(untied, tmp_path / "sharded"))


def change(file: Path, how: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Store other tensors under the same name."""
    tensors = load_file(file)
    how(tensors)
    save_file(tensors, file, {"format": "pt"})


def set_in(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def spoil(tensors: dict[str, torch.Tensor], value: float = float("nan")) -> None:
    tensors[NORM][3] = value


def told(*arguments: object, code: int = 2) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return " ".join(result.stderr.split())


# -- whole -----------------------------------------------------------------------------------------------------


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What transformers logs at its own level, warnings, wherever its own handler writes to."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_what_is_whole_is_loaded_to_the_bit(tied: Path, untied: Path, heard: list[str]) -> None:
    for folder in (tied, untied):
        model, tokenizer = load_pretrained(str(folder))
        stored: dict[str, torch.Tensor] = {}
        for file in folder.glob("*.safetensors"):
            stored |= load_file(file)
        assert stored
        for name, tensor in stored.items():
            assert torch.equal(model.state_dict()[name], tensor), name
        assert len(tokenizer) == len(character_tokenizer())
    assert heard == []


def test_only_while_it_loads_and_only_up_to_warnings_the_loader_is_not_heard(
    tied: Path, heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, read = logging.getLogger("transformers.modeling_utils"), AutoModelForCausalLM.from_pretrained

    def reading(*given: object, **options: object) -> object:
        loader.warning("a warning within")
        loader.error("an error within")
        return read(*given, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", reading)
    load_pretrained(str(tied))
    loader.warning("a warning afterwards")
    assert heard == ["an error within", "a warning afterwards"]


def test_a_missing_tensor_is_named_with_its_file(folder: Path, heard: list[str]) -> None:
    change(folder / WEIGHTS, lambda tensors: tensors.pop(NORM))
    with pytest.raises(ModelError, match=r"is not whole: model\.safetensors comes without model\.norm\.weight, which"):
        load_pretrained(str(folder))
    assert heard == [], "the loader's own table says it in other words"


def test_a_tensor_that_its_shard_does_not_hold_is_named_with_the_shard(sharded: Path) -> None:
    shard = json.loads((sharded / INDEX).read_text())["weight_map"]["lm_head.weight"]
    change(sharded / shard, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=rf"by {re.escape(INDEX)} {re.escape(shard)} holds lm_head\.weight, and it"):
        load_pretrained(str(sharded))


def test_a_tensor_that_neither_index_nor_shard_has(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    shard = index["weight_map"].pop("lm_head.weight")
    (sharded / INDEX).write_text(json.dumps(index))
    change(sharded / shard, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"come without lm_head\.weight, which Qwen3ForCausalLM has"):
        load_pretrained(str(sharded))


def test_a_tensor_without_a_place_is_named_with_its_file(folder: Path) -> None:
    change(folder / WEIGHTS, lambda tensors: tensors.update({"model.norm.bias": torch.zeros(32)}))
    with pytest.raises(ModelError, match=r"model\.safetensors comes with model\.norm\.bias, for which Qwen3"):
        load_pretrained(str(folder))


def test_a_tensor_of_another_shape_is_named_with_both(folder: Path) -> None:
    change(folder / WEIGHTS, lambda tensors: tensors.update({NORM: torch.ones(16)}))
    with pytest.raises(ModelError, match=r"with model\.norm\.weight of shape \(16,\) instead of \(32,\)"):
        load_pretrained(str(folder))


def test_of_many_a_few_are_named(folder: Path) -> None:
    change(folder / WEIGHTS, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers" in name])
    with pytest.raises(ModelError, match=r"without model\.layers\.0\.\S+, \S+, \S+ and \d+ more, which"):
        load_pretrained(str(folder))


def test_masks_that_early_versions_stored_are_no_weights(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    config = GPTJConfig(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, rotary_dim=4, n_positions=32)
    GPTJForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    place = "transformer.h.0.attn"
    masks = {f"{place}.bias": torch.ones(1, 1, 32, 32).tril(), f"{place}.masked_bias": torch.tensor(-1e9)}
    change(tmp_path / WEIGHTS, lambda tensors: tensors.update(masks))
    load_pretrained(str(tmp_path))
    change(tmp_path / WEIGHTS, lambda tensors: tensors.update({f"{place}.bias": torch.ones(16)}))
    with pytest.raises(ModelError, match=r"comes with transformer\.h\.0\.attn\.bias, for which GPTJForCausalLM"):
        load_pretrained(str(tmp_path))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_finite_numbers_are_named_with_their_file(folder: Path, value: float) -> None:
    change(folder / WEIGHTS, lambda tensors: spoil(tensors, value))
    with pytest.raises(ModelError, match=r"not finite numbers \(model\.norm\.weight in model\.safetensors\)"):
        load_pretrained(str(folder))


# -- files -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_pickle_is_refused_and_the_way_to_convert_it_works(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"its weights are a pickle \(pytorch_model\.bin\)") as refused:
        load_pretrained(str(folder))
    found = re.search(r"write it anew with (python -c .+) and give that folder", str(refused.value))
    assert found is not None
    python, option, program = shlex.split(found[1])
    assert (python, option) == ("python", "-c")
    monkeypatch.chdir(tmp_path)
    exec(program)
    model, _ = load_pretrained(str(tmp_path / "NEW"))
    assert torch.equal(model.state_dict()[NORM], weights[NORM])


def test_a_pickle_behind_an_index_of_safetensors_is_never_read(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "pytorch_model.bin")}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"names 'pytorch_model\.bin', which is no safetensors file inside"):
        load_pretrained(str(folder))


@pytest.mark.parametrize("outside", ["../other.safetensors", "/tmp/other.safetensors", "a/../../other.safetensors"])
def test_an_index_that_points_outside_of_its_folder(sharded: Path, outside: str) -> None:
    shard = next(iter(sharded.glob("*-00001-of-*")))
    shutil.copy(shard, sharded.parent / "other.safetensors")
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"] = {k: outside if v == shard.name else v for k, v in index["weight_map"].items()}
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=rf"index\.json names '{re.escape(outside)}', which is no safetensors file"):
        load_pretrained(str(sharded))


def test_weights_named_by_the_config_are_inside_too(folder: Path) -> None:
    shutil.move(folder / WEIGHTS, folder.parent / "other.safetensors")
    set_in(folder / "config.json", transformers_weights="../other.safetensors")
    with pytest.raises(ModelError, match=r"config\.json names '\.\./other\.safetensors', which is no safetensors file"):
        load_pretrained(str(folder))
    shutil.move(folder.parent / "other.safetensors", folder / "own.safetensors")
    set_in(folder / "config.json", transformers_weights="own.safetensors")
    load_pretrained(str(folder))


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*-of-*"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=rf"is not whole: {re.escape(INDEX)} names {shard.name}, which is missing"):
        load_pretrained(str(sharded))


def truncated(name: str, keep: float) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: int(keep * len(whole))])

    return cut


def written(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated(WEIGHTS, 0.9), r"could not be loaded \(model\.safetensors is damaged: .+\); copy or save"),
        (truncated(WEIGHTS, 0.001), r"could not be loaded \(model\.safetensors is damaged: .+\); copy or save"),
        (truncated(WEIGHTS, 0), r"could not be loaded \(model\.safetensors is damaged: .+\); copy or save"),
        (lambda folder: (folder / WEIGHTS).unlink(), r"has no weights \(no model\.safetensors and no model\.safet"),
        (written("config.json", "{"), r"\(config\.json is damaged: .+line 1"),
        (written("config.json", "[1]"), r"\(config\.json holds no JSON object\)"),
        (written("config.json", '{"a": ' * 3000), r"config\.json is damaged"),
        (written("config.json", '{"model_type": "nonesuch"}'), r"model type `nonesuch` but Transformers does not"),
        (written("config.json", "{}"), r"could not be loaded \(Unrecognized model in"),
        (lambda folder: set_in(folder / "config.json", model_type="vit"), r"is a vit, which writes no text"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"the folder has no tokenizer"),
        (written("tokenizer.json", "{"), r"\(tokenizer\.json is damaged: .+line 1"),
        (written("adapter_config.json", "{}"), r"is an adapter, not a whole model: merge it .+--merged"),
    ],
)
def test_a_damaged_folder(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message):
        load_pretrained(str(folder))


def test_an_exported_team_and_a_run_say_which_folder_is_meant(tmp_path: Path) -> None:
    for team, file in (("adapters", "adapter_config.json"), ("models", "config.json")):
        for agent in ("left", "right"):
            (tmp_path / team / agent).mkdir(parents=True)
            (tmp_path / team / agent / file).write_text("{}")
    with pytest.raises(ModelError, match=r"holds adapters \(left, right\), not a model: .+--merged`"):
        load_pretrained(str(tmp_path / "adapters"))
    with pytest.raises(ModelError, match=r"holds several models, not one: .+\(.+/models/left, .+/models/right\)"):
        load_pretrained(str(tmp_path / "models"))
    (tmp_path / "run" / "checkpoints" / "commits").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"run folder, not a model; `teamtr export .+/run FOLDER --agent"):
        load_pretrained(str(tmp_path / "run"))


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index(sharded: Path, index: str) -> None:
    (sharded / INDEX).write_text(index)
    with pytest.raises(ModelError, match=r"index\.json (is damaged|holds no JSON|has no weight_map)"):
        load_pretrained(str(sharded))


# -- code ------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with Python code, before somebody who says yes to everything, as in ``yes | teamtr check``."""
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    return folder


def test_a_model_that_needs_its_own_code_is_refused(with_code: Path) -> None:
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    set_in(with_code / "config.json", model_type="own", auto_map=own)
    with pytest.raises(ModelError, match=r"needs Python code that comes with it \(auto_map\), which is never run"):
        load_pretrained(str(with_code))
    assert not (with_code / "ran").exists()


def test_a_tokenizer_that_needs_its_own_code_is_refused(with_code: Path) -> None:
    """Also where a general tokenizer could read its files: it may split text otherwise."""
    own = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    set_in(with_code / "tokenizer_config.json", auto_map=own, tokenizer_class="OwnTokenizer")
    for load in (load_tokenizer, load_pretrained):
        with pytest.raises(ModelError, match=r"tokenizer of model .+ needs Python code that comes with it"):
            load(str(with_code))
    assert not (with_code / "ran").exists()


def test_code_beside_a_model_that_transformers_has_itself_is_left_alone(with_code: Path) -> None:
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    set_in(with_code / "config.json", auto_map=own)
    set_in(with_code / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Qwen2Tokenizer", None]})
    model, _ = load_pretrained(str(with_code))
    assert type(model) is Qwen3ForCausalLM
    assert not (with_code / "ran").exists()


def test_every_loader_is_told_to_run_no_code() -> None:
    """A call without the keyword asks on the terminal, and a pipe may answer."""
    told = []
    sources = [file.read_text() for file in (Path(__file__).parents[2] / "src" / "teamtr").rglob("*.py")]
    for source in sources:
        for call in ast.walk(ast.parse(source)) if ".from_pretrained(" in source else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("from_pretrained"):
                told.append((ast.unparse(call.func), [ast.unparse(k) for k in call.keywords]))
    loaders = [keywords for name, keywords in told if name.startswith(("Auto", "model_class"))]
    assert len(loaders) == 5
    assert all("trust_remote_code=False" in keywords for keywords in loaders)
    others = {name for name, _ in told if not name.startswith(("Auto", "model_class"))}
    assert others == {"PeftModel.from_pretrained", "GenerationConfig.from_pretrained"}, "our own commit; no model"


# -- revisions -------------------------------------------------------------------------------------------------


@pytest.fixture
def cached(tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A hub's cache with two revisions of one model, whose norms are 1 and 2; the hub does not answer."""
    repo, folders = tmp_path / "hub" / "models--me--words", {}
    (repo / "refs").mkdir(parents=True)
    for k, (branch, commit) in enumerate({"main": "a" * 40, "other": "b" * 40}.items()):
        folders[branch] = Path(shutil.copytree(tied, repo / "snapshots" / commit))
        (repo / "refs" / branch).write_text(commit)
        change(folders[branch] / WEIGHTS, lambda tensors, k=k: tensors[NORM].fill_(k + 1.0))
    for module in ("huggingface_hub.constants.HF_HUB_CACHE", "huggingface_hub.file_download.constants.HF_HUB_CACHE"):
        monkeypatch.setattr(module, str(tmp_path / "hub"))
    return folders


@pytest.mark.parametrize(("revision", "norm"), [(None, 1.0), ("main", 1.0), ("other", 2.0), ("b" * 40, 2.0)])
def test_a_revision_pins_a_hub_id(cached: dict[str, Path], revision: str | None, norm: float) -> None:
    model, _ = load_pretrained("me/words", revision)
    assert float(model.model.norm.weight.detach()[0]) == norm
    load_tokenizer("me/words", revision)
    in_parts = load_outline("me/words", revision)
    with Reader() as reader:
        assert float(reader.whole(in_parts.stored[NORM])[0]) == norm
    assert in_parts.model.name_or_path == model.name_or_path == "me/words"


def test_what_is_wrong_with_a_hub_s_model_is_told_of_the_revision(cached: dict[str, Path]) -> None:
    change(cached["other"] / WEIGHTS, lambda tensors: tensors.pop(NORM))
    load_pretrained("me/words")
    with pytest.raises(ModelError, match=r"'me/words' is not whole: model\.safetensors comes without model\.norm"):
        load_pretrained("me/words", "other")
    change(cached["main"] / WEIGHTS, spoil)
    with pytest.raises(ModelError, match=r"\(model\.norm\.weight in model\.safetensors\)"):
        load_pretrained("me/words")


def test_a_revision_that_is_not_there(cached: dict[str, Path], tied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"'me/words' \(revision nonesuch\): .+the hub could not be reached"):
        require_source("me/words", "nonesuch")

    def unknown(url: str, timeout: float) -> None:
        assert "/resolve/nonesuch/" in url
        raise RevisionNotFoundError.__new__(RevisionNotFoundError)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unknown)
    with pytest.raises(ModelError, match="the hub has no revision 'nonesuch' of it; give a branch"):
        load_tokenizer("me/words", "nonesuch")
    with pytest.raises(ModelError, match="is a folder, and revision 'main' is for hub ids"):
        load_pretrained(str(tied), "main")


def test_a_hub_s_model_without_safetensors(cached: dict[str, Path]) -> None:
    weights = load_file(cached["main"] / WEIGHTS)
    (cached["main"] / WEIGHTS).unlink()
    torch.save(weights, cached["main"] / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickled weights are not read.+from_pretrained\('me/words'\)"):
        load_pretrained("me/words")


def test_whose_revision_is_whose() -> None:
    """The team's goes with the team's model; an agent with a model of its own has its own, or none."""
    text = """\
name: x
task: {name: sums}
team:
  model: me/words
  revision: one
  agents: [{name: a}, {name: b, revision: two}, {name: c, model: you/words}, {name: d, model: tiny}]
"""
    agents = loads(text, "x").team.agents
    assert [agent.source for agent in agents] == [
        ("me/words", "one"),
        ("me/words", "two"),
        ("you/words", None),
        ("tiny", None),
    ]
    with pytest.raises(ConfigError, match='agent "d" is tiny, which has no revision; leave it out'):
        loads(text.replace("model: tiny", "model: tiny, revision: main"), "x")


def test_agents_of_python_have_revisions(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a model object has no revision"):
        Agent("a", *tiny_model(TinyShape(1, 16, 2), seed=0), revision="main")
    agents = [Agent("a", "me/words", revision="one"), Agent("b", "me/words")]
    trainer = TeamTrainer(agents, lambda **_: [], ROWS, output_dir=tmp_path / "run")
    assert [agent.revision for agent in trainer.team_file.team.agents] == ["one", None]


# -- wherever a base is loaded ---------------------------------------------------------------------------------


def test_check_says_it(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "team.yaml"
    file.write_text(TEAM % folder)
    change(folder / WEIGHTS, lambda tensors: tensors.pop(NORM))
    assert "model.safetensors comes without model.norm.weight" in told("check", file)


def test_a_trainer_says_it_of_folders_and_of_objects(folder: Path, tmp_path: Path) -> None:
    def trained(agent: Agent) -> None:
        TeamTrainer([agent], lambda **_: [], ROWS, output_dir=tmp_path / "run").train()

    change(folder / WEIGHTS, spoil)
    with pytest.raises(UserError, match=r"model\.norm\.weight in model\.safetensors"):
        trained(Agent("a", folder))
    model, tokenizer = tiny_model(TinyShape(1, 16, 2), seed=0)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.inf
    with pytest.raises(UserError, match=r"the model of agent 'a' has .+ not finite numbers \(model\.norm\.weight"):
        trained(Agent("a", model, tokenizer))
    assert not (tmp_path / "run").exists()


def test_what_is_written_by_transformers_is_finite_and_whole(tied: Path) -> None:
    """The check itself changes nothing and says nothing of a model that is fine."""
    require_finite(AutoModelForCausalLM.from_pretrained(tied).state_dict(), "a model")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_no_place_hides_what_is_no_finite_number(bad: float, dtype: torch.dtype) -> None:
    fine = {"a": torch.linspace(-3, 3, 1001).to(dtype), "b": torch.zeros(0, dtype=dtype), "c": torch.arange(3)}
    require_finite(fine, "a model")
    for place in (0, 500, 1000):
        broken = fine["a"].float()
        broken[place] = bad
        with pytest.raises(ModelError, match=r"a model has .+ not finite numbers \(a\)"):
            require_finite({**fine, "a": broken.to(dtype)}, "a model")
