"""``TeamTrainer``: trains a team from Python. It runs the same code as ``teamtr train``.

The run folder, resumption, report and guarantees are those of the command line. Objects that only Python can supply
(models, functions and your own classes) are named in the folder's team file under ``python``, so that a run that is
resumed with other objects is refused. Such a run is resumed with ``TeamTrainer``, not with ``teamtr train``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from teamtr.api.agents import Agent, TrainedAgent, lora_settings
from teamtr.api.callbacks import AnyCallback, Record, tell
from teamtr.api.rewards import Dataset, RewardFunc, RewardTask
from teamtr.errors import UserError
from teamtr.presets import Plan
from teamtr.theory.estimators import AdvantageEstimator, CriticAdvantage, GroupAdvantage

if TYPE_CHECKING:
    from teamtr.config import TeamFile
    from teamtr.reports import EvalReport
    from teamtr.session.build import Parts
    from teamtr.session.resume import StoredRun
    from teamtr.tasks import Task
    from teamtr.team import Router


class TeamTrainer:
    """Fine-tunes a team of language models, one agent at a time, each update inside its KL trust region.

    Args:
        agents: the team, in speaking order unless ``router`` sets another.
        reward_funcs: ``f(prompts, completions, **columns)``, which returns a reward for each completion: a number, one
            for each agent, or one for each message; a list of such functions, whose rewards are added; or a ``Task``.
        train_dataset: rows with a ``prompt``: a list of dicts or a ``datasets.Dataset``. Not with a ``Task``.
        eval_dataset: held-out rows; without them a tenth of the training prompts is held out.
        args: the algorithm: ``Plan.preset("teamtr", radius=0.05)``, or any ``Plan``.
        output_dir: the run folder; if it holds a run, that run is resumed.
        callbacks: called with every record of the log; they may stop the run.
        router: who speaks when: as in the team file (``{"order": [...], "rounds": 2}``), or your own ``Router``.
        answer: whose message is the team's answer: ``"last"``, ``"majority"`` or an agent's name.
        seed: seed of all randomness.
        reward_weights: weights of the reward functions, in their order; 1 each by default.
        reward_range: largest minus smallest reward, if known; needed for certificates.
        success_threshold: a reward of at least this counts as success.
        config: any other setting of the team file by its dotted key, such as ``{"learner.learning_rate": 1e-5}``.
    """

    def __init__(
        self,
        agents: Sequence[Agent],
        reward_funcs: RewardFunc | Sequence[RewardFunc] | Task,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        args: Plan | None = None,
        output_dir: str | Path = "runs/team",
        callbacks: Sequence[AnyCallback] = (),
        *,
        router: Mapping[str, Any] | Router | None = None,
        answer: str = "last",
        seed: int = 0,
        reward_weights: Sequence[float] | None = None,
        reward_range: float | None = None,
        success_threshold: float = 1.0,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if not agents:
            raise UserError("a team needs at least one agent")
        for agent in agents:
            if not isinstance(agent, Agent):
                raise UserError(f"agents must be a list of Agent(NAME, MODEL), got {agent!r:.80}")
        if not isinstance(args, Plan | None):
            raise UserError(f"args must be a Plan, such as Plan.preset('teamtr', radius=0.05), got {args!r:.80}")
        self.output_dir = Path(output_dir)
        self.callbacks = tuple(callbacks)
        self.plan = Plan() if args is None else args
        self._agents = tuple(agents)
        self._sources = {id(agent): _source(agent) for agent in agents}
        _require_one_tokenizer(agents, self._sources)
        self._task = _task(reward_funcs, train_dataset, eval_dataset, success_threshold, reward_range, reward_weights)
        self._router = _checked(router, self._agents, answer)
        self._stopping = False
        self.team_file = self._team_file(answer, seed, dict(config or {}))

    # -- public methods ---------------------------------------------------------------------------------------

    def train(self, *, accept_changes: bool = False) -> list[Record]:
        """Train to the end of the plan, or resume the run in ``output_dir``; returns the records of this call.

        A run resumes only with the data, rewards and models that it began with; ``accept_changes`` allows others.
        """
        return list(self.records(accept_changes=accept_changes))

    def records(self, *, accept_changes: bool = False) -> Iterator[Record]:
        """Train like ``train``, and yield each record as it is made."""
        from teamtr.session.train import train

        self._stopping = False
        parts = self._parts()
        options: dict[str, Any] = {"parts": parts, "accept_changes": accept_changes}
        for record in train(self.team_file, self.output_dir, stop=lambda: self._stopping, **options):
            for callback in self.callbacks:
                tell(callback, record, self)
            yield record

    def stop(self) -> None:
        """End the run after the update in progress. Everything is saved, and ``train`` resumes from there."""
        self._stopping = True

    def evaluate(self, *, split: str = "test", problems: int | None = None, samples: int | None = None) -> EvalReport:
        """Evaluate on held-out problems with the run's newest weights, or with the initial ones if there is no run."""
        from teamtr.session.build import build
        from teamtr.session.success import evaluate_team

        stored = self._stored()
        if stored is None:
            session = build(self.team_file, parts=self._parts())
            team, stage = session.current_team(), 0
        else:
            session, team = stored.build(self._parts())
            stage = int(stored.commit.progress["stage"])
        try:
            report, _ = evaluate_team(session, team, stage=stage, split=split, problems=problems, samples=samples)
        finally:
            session.engine.close()
        return report

    @property
    def agents(self) -> dict[str, TrainedAgent]:
        """The agents of the run, to be saved or published."""
        return {agent.name: TrainedAgent(agent.name, self._export) for agent in self._agents}

    def report(self, path: str | Path | None = None) -> Path:
        """Write the run's report, one HTML file; by default into the run folder."""
        from teamtr.analysis.report import build_report, report_page

        target = self.output_dir / "report.html" if path is None else Path(path)
        target.write_text(report_page(build_report(self.output_dir)), encoding="utf-8")
        return target

    # -- implementation ---------------------------------------------------------------------------------------

    def _export(self, agent: str, folder: Path, merge: bool) -> Path:
        from teamtr.session.export import Form, export

        if self._stored() is None:
            raise UserError(f"there is no run in {self.output_dir} yet: call train() first")
        form: Form = "merged" if merge else "trained"
        export(self.output_dir, folder, agent=agent, form=form, task=self._task, load=self._loader())
        return folder

    def _stored(self) -> StoredRun | None:
        """The run in the folder, with the current settings; None if there is none. Refuses a run with other
        settings."""
        from teamtr.session.resume import StoredRun, require_same
        from teamtr.store import NotARun

        try:
            stored = StoredRun.read(self.output_dir)
        except NotARun:
            return None
        require_same(self.output_dir, stored.team_file, self.team_file)
        return replace(stored, team_file=self.team_file)

    def _parts(self) -> Parts:
        from teamtr.session.build import Parts
        from teamtr.session.cluster import engine_of

        router = None if self._router is None or isinstance(self._router, Mapping) else self._router
        return Parts(self._task, self.plan, router, partial(engine_of, load=self._loader()))

    def _loader(self) -> Callable[[str], tuple[Any, Any]] | None:
        objects: dict[str, Any] = {self._sources[id(a)]: (a.model, a.tokenizer) for a in self._agents if a.is_object}

        def load(source: str) -> tuple[Any, Any]:
            """Return a copy each time: training changes weights, and adapters change layers."""
            model, tokenizer = deepcopy(objects[source])
            return model, tokenizer

        return load if objects else None

    def _team_file(self, answer: str, seed: int, config: dict[str, Any]) -> TeamFile:
        from teamtr.config import from_data, plan_keys

        agents = []
        for agent in self._agents:
            settings: dict[str, Any] = {
                "name": agent.name,
                "model": self._sources[id(agent)],
                "revision": agent.revision,
                "system_prompt": agent.system_prompt,
                "train": "full" if agent.lora is None else "lora",
                "sees": agent.sees,
                "max_tokens": agent.max_tokens,
                "frozen": agent.frozen,
                "tools": agent.tools if isinstance(agent.tools, str) else list(agent.tools),
            }
            if (lora := lora_settings(agent)) is not None:
                settings["lora"] = lora
            agents.append(settings)
        team: dict[str, Any] = {"agents": agents, "answer": answer}
        own = {"task": _describe(self._task)}
        if isinstance(self._router, Mapping):
            team["router"] = dict(self._router)
        elif self._router is not None:
            own["router"] = _describe(self._router)
            team["router"] = {"rounds": self._router.rounds}  # all that the file can hold of it
        if given := sorted(key for key in config if key.partition(".")[0] in SAID_ELSEWHERE):
            section = given[0].partition(".")[0]
            raise UserError(f"config has {given[0]!r}: give it to TeamTrainer as {SAID_ELSEWHERE[section]}")
        plan = plan_keys(self.plan)
        if not _has_keys(self.plan.advantage):
            own["advantage"] = _describe(self.plan.advantage)
        data = {
            "name": _run_name(self.output_dir),
            "seed": seed,
            "task": {"name": "object"},
            "team": team,
            "plan": plan,
            "python": own,
        }
        return from_data(data, "TeamTrainer", config).anchored(Path())


SAID_ELSEWHERE = {"plan": "args", "task": "reward_funcs", "python": "an object"}
"""Sections of the team file that have their own argument of ``TeamTrainer``."""


def _has_keys(advantage: AdvantageEstimator) -> bool:
    """Whether keys of a team file can describe the estimator completely; ``eps`` has no key."""
    if type(advantage) is GroupAdvantage or type(advantage) is CriticAdvantage:
        return advantage.eps == GroupAdvantage().eps
    return False


def _run_name(folder: Path) -> str:
    """The folder's name, without the characters that a team file does not allow in a name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).lstrip("._-")[:200] or "team"


def _checked(
    router: Mapping[str, Any] | Router | None, agents: Sequence[Agent], answer: str
) -> Mapping[str, Any] | Router | None:
    from teamtr.team import Router as AnyRouter

    if router is None or isinstance(router, Mapping):
        return router
    if not isinstance(router, AnyRouter):
        raise UserError(f"router must be a mapping or a teamtr.Router, got {router!r:.80}")
    if answer in [agent.name for agent in agents] and not router.turns_of(answer):
        raise UserError(f"answer names {answer!r}, who never speaks under {_describe(router)}")
    return router


def _task(
    given: RewardFunc | Sequence[RewardFunc] | Task,
    train: Dataset | None,
    test: Dataset | None,
    threshold: float,
    reward_range: float | None,
    weights: Sequence[float] | None,
) -> Task:
    from teamtr.tasks import Task as TaskBase

    if isinstance(given, TaskBase):
        if train is not None or test is not None:
            raise UserError("a Task brings its own problems: leave train_dataset and eval_dataset out")
        given_too = {
            "reward_weights": weights is not None,
            "reward_range": reward_range is not None,
            "success_threshold": threshold != 1.0,
        }
        if unused := [name for name, is_given in given_too.items() if is_given]:
            raise UserError(f"a Task grades by itself: {unused[0]} is for reward functions; leave it out")
        return given
    if train is None:
        raise UserError("reward functions need a train_dataset: rows with a 'prompt'")
    return RewardTask(given, train, test, weights=weights, threshold=threshold, reward_range=reward_range)


def _source(agent: Agent) -> str:
    """The agent's model as the team file names it; a model object is named by a hash of its weights."""
    if not agent.is_object:
        return str(agent.model)
    from teamtr.session.models import OBJECT, weights_hash

    return f"{OBJECT}{weights_hash(agent.model)}"


def _require_one_tokenizer(agents: Sequence[Agent], sources: Mapping[int, str]) -> None:
    """Refuse two tokenizers on the same weights, which are loaded once, with one tokenizer."""
    from teamtr.chat import ChatCodec

    firsts: dict[str, Agent] = {}
    for agent in agents:
        first = firsts.setdefault(sources[id(agent)], agent)
        if first.tokenizer is agent.tokenizer:
            continue
        if ChatCodec(first.tokenizer).identity != ChatCodec(agent.tokenizer).identity:
            raise UserError(
                f"agents {first.name!r} and {agent.name!r} have one model and two tokenizers or chat templates: give "
                "both the same"
            )


def _describe(thing: Any) -> str:
    """The name of a Python object in the run folder: its own ``describe()``, a dataclass with its values, or its
    class."""
    own = getattr(thing, "describe", None)
    if callable(own):
        return str(own())
    return repr(thing) if is_dataclass(thing) else type(thing).__qualname__
