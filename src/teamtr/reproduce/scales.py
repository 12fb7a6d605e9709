"""The team of a recipe at three scales: tiny models on two cores, one card with a given model, the paper's protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from teamtr.config import TeamFile, loads
from teamtr.errors import UserError
from teamtr.reproduce.recipe import Recipe, Variant
from teamtr.text import slug

Scale = Literal["tiny", "small", "paper"]
SCALES: tuple[Scale, ...] = ("tiny", "small", "paper")

ATTEMPTS = {"aime24": 64, "aime25": 64, "zebralogic": 64, "math500": 4, "planbench": 8, "arbench": 25}
"""K of avg@K and pass@K by benchmark, as in the paper (arbench: for each of its three parts)."""
DATA = {
    "aime24": ("BytedTsinghua-SIA/DAPO-Math-17k:train", "HuggingFaceH4/aime_2024:train"),
    "math500": ("agentica-org/DeepScaleR-Preview-Dataset:train", "HuggingFaceH4/MATH-500:test"),
    "gsm8k": ("openai/gsm8k:main:train", "openai/gsm8k:main:test"),
}
"""Hub ids of the training and evaluation data, unless the user gives others (``task.train=... task.test=...``)."""
RADIUS: dict[Scale, float] = {"tiny": 0.05, "small": 0.1, "paper": 0.01}
"""The radius in nats per message."""
HELD_OUT = {"aime24": 30, "aime25": 30}
"""Number of held-out problems of small benchmarks; others use at most 500."""
PAPER_MODEL = "Qwen/Qwen3-8B"

CODE = """\
task: {name: code, symbols: ABCD, skill: 0.6}
team:
  model: tiny
  agents: [{name: left, max_tokens: 2}, {name: right, max_tokens: 2}, {name: speaker, max_tokens: 3}]
"""
ROLES = """\
task: {{name: roles}}
team:
  model: tiny
  max_tokens: 2
  agents: [{agents}]
"""
TINY = """\
name: {name}
device: cpu
{game}\
plan: {{stages: 6, problems: 16, group_size: 16}}
learner: {{learning_rate: 1e-3, micro_batch: 256}}
tiny: {{layers: 1, warmup_steps: 150}}
eval: {{every: 1, samples: 16}}
diagnostics: {{every: {probes}}}
store: {{episodes: false}}
"""
LARGE = """\
name: {name}
task: {{name: "{task}"{data}}}
team:
  model: {model}
  train: {train}
  max_tokens: {tokens}
  agents:
{agents}
sampling: {{temperature: 0.8}} # and top-p 1: the policy that is sampled is the one that is trained
plan: {{stages: {stages}, problems: {problems}, group_size: 8}}
learner: {{learning_rate: {learning_rate}, epochs: {epochs}}}
eval: {{every: {every}, problems: {evaluated}, samples: {samples}}}
diagnostics: {{every: {probes}}}
"""
PROMPTS = {
    "solver": "Solve the problem in a few short steps. End with the answer, in the form that the problem asks for.",
    "checker": "Check the steps and numbers so far. Say in short what is wrong, if anything, then the answer.",
    "finaliser": "Do not reason. Reply with one line: the final answer, in the form that the problem asks for.",
}


@dataclass(frozen=True)
class Setting:
    """The user's choices: the scale; a model, a task and other settings instead of the scale's own; and the model that
    replaces an agent, in recipes that replace one."""

    scale: Scale = "tiny"
    model: str | None = None
    task: str | None = None
    seeds: int | None = None
    changes: tuple[str, ...] = ()
    newcomer: str | None = None

    @property
    def seed_numbers(self) -> range:
        """Three seeds, as in the paper, and one for tiny models, unless the user says how many."""
        return range(self.seeds if self.seeds is not None else 1 if self.scale == "tiny" else 3)

    def team_file(self, recipe: Recipe, variant: Variant, seed: int, last: tuple[str, ...] = ()) -> TeamFile:
        """The team to train for this variant. The user's settings override the variant's, and ``last`` overrides
        both."""
        name = f"{recipe.name}-{slug(variant.name)}"
        text = self._tiny(recipe, variant) if self.scale == "tiny" else self._large(recipe, variant)
        radius = RADIUS[self.scale] * variant.radius
        own = [f"seed={seed}", f"name={name}", f"plan.radius_nats_per_message={radius:g}"]
        changes = [*own, *variant.changes, *self.changes, *last]
        return loads(text, f"{recipe.name} ({self.scale})", changes)

    @property
    def replaced(self) -> str:
        """The agent that is replaced by another model."""
        return "speaker" if self.scale == "tiny" else "finaliser"

    @property
    def stages_after(self) -> int:
        """Number of stages after a replacement."""
        return {"tiny": 4, "small": 4, "paper": 20}[self.scale]

    def newcomer_file(self, recipe: Recipe, seed: int) -> TeamFile | None:
        """For tiny models: the team that provides a larger newcomer, which has learned the form of messages but nothing
        about the team that it joins; its one stage changes no weights. None if the user names the newcomer."""
        if self.scale != "tiny":
            if self.newcomer is None:
                raise UserError("this recipe replaces an agent: name the model that comes with --newcomer MODEL")
            return None
        other = ("tiny.layers=2", "tiny.width=96", "plan.stages=1", "learner.learning_rate=0", "eval.every=0")
        return self.team_file(recipe, Variant("newcomer"), 1000 + seed, last=other)

    def _tiny(self, recipe: Recipe, variant: Variant) -> str:
        if self.model is not None or self.task is not None:
            raise UserError("--scale tiny has its own model and games; give --model and --task with --scale small")
        game = CODE
        if variant.agents == 1:  # code exchange needs three speakers: two of them are frozen
            game = CODE.replace("max_tokens: 2}", "max_tokens: 2, frozen: true}")
        elif variant.agents is not None:
            names = ", ".join(f"{{name: a{k + 1}, sees: blind}}" for k in range(variant.agents))
            game = ROLES.format(agents=names)
        return TINY.format(name=recipe.name, game=game, probes=1 if recipe.probes else 0)

    def _large(self, recipe: Recipe, variant: Variant) -> str:
        paper = self.scale == "paper"
        if not paper and self.model is None:
            raise UserError("--scale small needs a model: --model FOLDER, or a hub id (Qwen/Qwen2.5-1.5B-Instruct)")
        task = self.task or (recipe.task if paper else "gsm8k")
        stages = recipe.stages if paper else 6
        given = any(change.startswith(("task.path=", "task.train=", "task.test=")) for change in self.changes)
        train, test = ("", "") if given else DATA.get(task, ("", ""))
        return LARGE.format(
            name=recipe.name,
            task=task,
            data=f', train: "{train}", test: "{test}"' if train else "",
            model=self.model or PAPER_MODEL,
            train="full" if paper else "lora",
            tokens=32768 if paper else 256 * (3 if variant.agents == 1 else 1),
            agents="\n".join(_agents(variant.agents or 3)),
            stages=stages,
            problems=128 if paper else 32,
            learning_rate="1e-6" if paper else "1e-4",
            epochs=2 if paper else 1,
            every=1 if paper else 2,
            evaluated=HELD_OUT.get(task, 500) if paper else 200,
            samples=ATTEMPTS.get(task.split(":")[0], 4) if paper else 1,
            probes=(5 if paper else 3) if recipe.probes else 0,
        )


def _agents(count: int) -> Sequence[str]:
    """A solver, a finaliser, and checkers in between for the remaining agents; a single agent is the solver."""
    names = ["solver", *(f"checker{k + 1}" if count > 3 else "checker" for k in range(count - 2)), "finaliser"][:count]
    return [f'    - {{name: {name}, system_prompt: "{PROMPTS[name.rstrip("0123456789")]}"}}' for name in names]
