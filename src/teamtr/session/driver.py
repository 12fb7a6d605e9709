"""The loop of one run: samples rollouts, updates agents, commits after every update and writes the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from teamtr.batches import AgentBatch, RolloutBatch
from teamtr.evaluation.best import best_of, out_of_patience
from teamtr.progress import working
from teamtr.randomness import generator, seed_of
from teamtr.records import (
    AnyRecord,
    EvalRecord,
    FinishedRecord,
    MeasuredGain,
    ResumeRecord,
    RolloutChoice,
    StageMemory,
    StageRecord,
    StartRecord,
    StoppedRecord,
    UpdateRecord,
    decode_record,
    encode_record,
    updates_before,
)
from teamtr.reports import UpdateReport, WarmupReport
from teamtr.rollout import certified_range, punishments_PG, trained_returns_PG
from teamtr.rollout.cost import Account, price_of_sampling
from teamtr.session.beside import work_beside
from teamtr.session.budget import matched_budget
from teamtr.session.build import Session
from teamtr.session.checks import doubts, measure_floors, require_visible, self_test
from teamtr.session.history import History
from teamtr.session.inputs import Inputs, inputs_of, require_same_inputs
from teamtr.session.memory import before_servers, before_training, peak_gb
from teamtr.session.probing import StageProbes
from teamtr.session.rollouts import Ahead, Gathered, StageRollouts
from teamtr.session.state import Position, RunState
from teamtr.session.success import evaluate_team, exact_success
from teamtr.session.warmup import warm_up
from teamtr.store import (
    Commit,
    RunFolder,
    StoreError,
    batch_name,
    read_episodes,
)
from teamtr.team import Team
from teamtr.theory.intervals import measured_gain
from teamtr.training.algorithm import Slot, Step, gain_of_episode, run_stage, schedule
from teamtr.training.batch import TrainingBatch
from teamtr.training.certify import CertificateInputs
from teamtr.training.health import LastHealth
from teamtr.training.radii import shared_radii
from teamtr.training.rewards import rewards_of
from teamtr.training.stage import stage_report
from teamtr.training.update import Update, update_agent

Record = dict[str, Any]
"""A record as it is logged and yielded."""


@dataclass(frozen=True)
class Lost:
    """Why an engine was lost, and how many seconds of work since the last commit were lost with it."""

    why: str
    seconds: float


class Driver:
    """Runs the loop of one run, with its commits and its log."""

    def __init__(
        self,
        run: RunFolder,
        session: Session,
        stop: Callable[[], bool],
        accept_changes: bool,
        seconds: Mapping[str, float],
        lost: Lost | None = None,
    ) -> None:
        self.run = run
        self.seconds = dict(seconds)
        self.lost = lost
        self.committed = time.perf_counter()
        self.session = session
        self.stop = stop
        self.accept_changes = accept_changes
        self.inputs = inputs_of(session)
        self.changes: tuple[str, ...] = ()
        self.seed = session.team_file.seed
        self.account = Account()
        self.team = session.current_team()
        self.position = Position()
        self.states = dict.fromkeys(session.team.names, session.plan.first_state())
        self.fingerprints: dict[str, str] = {}
        self.exact: float | None = None
        self.history = History()
        self.health = LastHealth()
        self.measured: MeasuredGain | None = None
        self.gathered: Gathered | None = None
        self.probed: Record | None = None
        self.memory: Record | None = None

    def go(self, commit: Commit | None) -> Iterator[Record]:
        """Run from this commit to the end of the plan; None starts a new run."""
        yield self._begin_or_resume(commit)
        stages = self.session.plan.stages
        while self.position.stage < stages:
            if self.position.done == 0:
                yield from self._evaluate_if_due()
                if self._is_out_of_patience:
                    break
                if self.stop():
                    yield encode_record(StoppedRecord(**self._where()))
                    return
            for record in self._stage():
                yield record
                if self.stop():
                    yield encode_record(StoppedRecord(**self._where()))
                    return
            yield from self._close_stage()
            self._settle_sampling_cost()
            self.position = self.position.next_stage()
        yield from self._evaluate_if_due(last=True)
        best, early = best_of(self.history.held_out), self.position.stage < stages
        tokens = self.account.sampled_tokens
        yield encode_record(FinishedRecord(**self._where(), tokens=tokens, best=best, stopped_early=early))

    # -- one stage --------------------------------------------------------------------------------------------

    def _stage(self) -> Iterator[Record]:
        stage, plan = self.position.stage, self.session.plan
        past = self.history.last_updates(stage)
        gains = {name: gain_of_episode(report, plan.group_size) for name, report in past.items()}
        slots = schedule(plan.order, self.team.trainable, generator(self.seed, "order", stage), gains)
        self._share_out_radii(past)
        rollouts = StageRollouts(self.session, stage)
        held = self._held_batch(slots)
        if self.position.done == 0 and self._probes.are_due(0):
            self._probes.begin(self.team)

        def sample(team: Team, step: int, worn: RolloutBatch | None) -> Gathered:
            with self._keeping_scores(next(slot.agent for slot in slots if slot.step == step)):
                return rollouts.gather(team, step, worn)

        sampled = Ahead(sample)

        def gather(team: Team, step: int, worn: RolloutBatch | None) -> RolloutBatch:
            self.gathered = sampled(team, step, worn)
            batch = self.gathered.batch
            self.account.sampled(self.gathered.ledger)
            self._measure(batch)
            name = batch_name(stage, step)
            if not self.session.team_file.store.episodes and not plan.reuses_rollouts:
                return batch
            self.run.write_episodes(name, batch)
            again, numbers = rollouts.drawn_again(self._last_batch()) if step == 0 else (None, ())
            past = None if again is None else {"batch": self.position.batch, "problems": list(numbers)}
            self.position = replace(self.position, batch=name, reused=None, past=past)
            return batch if again is None else batch.joined(again)

        steps = run_stage(
            self.team,
            plan,
            gather,
            self._teach,
            slots,
            done=self.position.done,
            batch=held,
            price=self._price,
        )
        for step in steps:
            following = slots[step.index + 1 : step.index + 2]
            early = partial(sampled.sample_early, step.team, following[0].step) if self._samples(following) else None
            yield self._commit(step, early)

    def _samples(self, following: Sequence[Slot]) -> bool:
        """Whether it is certain that a new batch is sampled before the following slot. False for plans that may reuse
        the current batch: some decide by measured times, which other work during sampling would change."""
        always = not self.session.plan.resample.may_be_stale
        return always and any(slot.opens for slot in following) and not self.stop()

    @contextmanager
    def _keeping_scores(self, agent: str) -> Iterator[None]:
        """Within, the sampler keeps scores of the agent that is updated next, if its update may use them. Scores of
        other agents are not kept: a later update comes after a commit, and a run that resumes from it has none."""
        keeps, engine = self.session.optimization.score == "sampler", self.session.engine
        if keeps:
            engine.keep_scores(agent)
        yield
        if keeps:
            engine.keep_scores(None)

    def _last_batch(self) -> RolloutBatch | None:
        """The last stage's batch, if the plan may train on it once more."""
        return self.position.held(self._read_batch) if self.session.plan.resample.across_stages else None

    def _read_batch(self, name: str) -> RolloutBatch:
        return read_episodes(self.run.episodes / name)

    def _price(self, batch: RolloutBatch, own: AgentBatch) -> float | None:
        cost = self.session.plan.resample.sampling_cost
        known = self.position.sampling_cost if cost == "measured" else cost
        return price_of_sampling(known, batch, own, self.session.optimization.epochs)

    def _settle_sampling_cost(self) -> None:
        """Fix the sampling cost once, after the first stage that sampled and trained: as the nearest power of two, so
        that fluctuations of the machine do not matter. It is part of every later commit."""
        if self.session.plan.resample.sampling_cost == "measured" and self.position.sampling_cost is None:
            self.position = replace(self.position, sampling_cost=self.account.sampling_cost())

    def _share_out_radii(self, past: Mapping[str, UpdateReport]) -> None:
        """Set this stage's radii from what each agent's last update gained. Unchanged while an agent has no update
        yet."""
        router = self.session.context.router
        names = [name for name in self.team.trainable if router.turns_of(name)]
        if self.session.plan.radii.allocation == "equal" or any(name not in past for name in names):
            return
        turns = {name: router.turns_of(name) for name in names}
        shared = shared_radii(self.session.plan.radii, past, turns, self._return_range or 1.0)
        for name, radius in shared.items():
            self.states[name] = replace(self.states[name], radius_nats=radius)

    def _held_batch(self, slots: Sequence[Slot]) -> RolloutBatch | None:
        """The batch with which an interrupted stage resumes; None if its next update samples a new one."""
        position = self.position
        if not 0 < position.done < len(slots) or not self.session.plan.reuses_rollouts:
            return None
        return position.held(self._read_batch)

    def _teach(self, agent: str, data: TrainingBatch) -> Update:
        plan, router = self.session.plan, self.session.context.router
        learner = self.session.engine.learner(agent)
        probes, done = self._probes, self.position.done
        before = learner.snapshot() if probes.are_due(done) else None
        fresh = probes.play(self.team, agent) if before is not None and done > 0 else None
        optimization = self.session.optimization
        if plan.reuses_rollouts:
            optimization = replace(optimization, gate_share=1.0)  # the ratios of all messages are needed anyway
        update = update_agent(
            learner,
            data,
            plan,
            optimization,
            self.states[agent],
            seed=seed_of(self.seed, "update", self.position.stage, agent),
            holdout_seed=seed_of(self.seed, "aside", self.position.stage),
            certificate_inputs=CertificateInputs(
                router.turns_of(agent),
                router.horizon,
                certified_range(plan, self.session.task.reward_range, self.team, router, agent),
            ),
        )
        self.session.engine.publish(agent, update.report.version_after)
        self.account.updated(agent, update.report.tokens, update.report.seconds)
        self.probed = None
        if before is not None and update.report.accepted:
            found = probes.of_update(agent, self.team, before, data, fresh, self.position.carried)
            self.probed, self.position = found.record, replace(self.position, carried=found.carried)
        return update

    @property
    def _probes(self) -> StageProbes:
        return StageProbes(self.session, self.run, self.account, self.position.stage)

    @property
    def _return_range(self) -> float | None:
        return self.session.plan.return_range(self.session.task.reward_range)

    # -- gains and stage reports ------------------------------------------------------------------------------

    def _measure(self, batch: RolloutBatch) -> None:
        """Measure what the previous update gained, if this is a fresh batch of the same problems."""
        returns_PG = trained_returns_PG(batch, self.session.plan, self.team.limits)
        before = self.position.returns
        self.measured = None
        plan = self.session.plan
        comparable = not plan.reuses_rollouts and not plan.dynamic_sampling.on and len(returns_PG) > 1
        if before is not None and comparable and np.isfinite(before).all() and np.isfinite(returns_PG).all():
            gain = measured_gain(before, returns_PG)
            self.measured = MeasuredGain(update=self.position.number, **asdict(gain))
        self.position = replace(self.position, returns=returns_PG.tolist())

    def _close_stage(self) -> Iterator[Record]:
        """Log the stage's report, computed from its updates, once."""
        stage = self.position.stage
        if stage in self.history.closed:
            return
        report = stage_report(stage, self.history.of_stage(stage))
        memory = None if self.memory is None else StageMemory(self.memory["planned_gb"], peak_gb(self.session))
        written = self._log(StageRecord(report=report, updates=self.position.number, memory=memory))
        self._probes.end()
        yield written

    # -- commits and log --------------------------------------------------------------------------------------

    def _commit(self, step: Step, meanwhile: Callable[[], None] | None) -> Record:
        """Commit and log an update. Everything that it changed is recorded before ``meanwhile`` begins, so that nothing
        that ``meanwhile`` changes is in the record or the commit."""
        self.team = step.team
        self.states[step.report.agent] = step.update.state
        self.position = replace(self.position.holding(step.batch), number=self.position.number + 1, done=step.index + 1)
        rewards = np.array([e.reward for e in step.batch.present])
        gathered = self.gathered
        exact_before, self.exact = self.exact, exact_success(self.session, self.team)
        record = UpdateRecord(
            update=self.position.number,
            stage=self.position.stage,
            step=step.index,
            report=step.report,
            reward=float(rewards[np.isfinite(rewards)].mean()) if np.isfinite(rewards).any() else float("nan"),
            punishment=self._mean_punishment(step.batch),
            dynamic_sampling=None if gathered is None else gathered.dynamic,
            rollouts=RolloutChoice(
                **asdict(step.choice), cut=step.cut, partly=None if gathered is None else gathered.partly
            ),
            grader_failures=dict(self.session.task.failures),
            protocol_breaches=self.session.breaches(),
            success=float(np.mean([e.verdict.right for e in step.batch.present])),
            health=self.health.after(step.batch, self.team.limits, step.report),
            rewards=rewards_of(step.batch, self.session.task.printed.take()),
            exact_success=None if self.exact is None else (exact_before, self.exact),
            measured_before=self.measured,
            probe=self.probed,
            episodes_total=self.account.episodes,
            sampled_tokens_total=self.account.sampled_tokens,
            time=time.time(),
        )
        raised = self._save(record, step.report.agent, meanwhile)
        self.measured = self.gathered = None
        written = self._log(record)
        if raised is not None:
            raise raised
        return written

    def _log(self, record: AnyRecord) -> Record:
        """Add the record to the log and to the history; returns what was written."""
        written = self.run.log.write(record)
        self.history.add(record)
        return written

    def _mean_punishment(self, batch: RolloutBatch) -> float | None:
        """Mean punishment of overlong messages in the batch's returns; None if the plan punishes none."""
        plan = self.session.plan
        return float(punishments_PG(batch, plan, self.team.limits).mean()) if plan.overlong.punishes else None

    def _save(
        self, record: UpdateRecord | None, updated: str | None, meanwhile: Callable[[], None] | None = None
    ) -> BaseException | None:
        """Commit the run's state, with the weights of the agent that was updated, or of all. If the engine allows
        writing from another thread, ``meanwhile`` runs during the writing; returns what it raised, once the commit is
        made."""
        learner, number = self.session.engine.learner, self.position.number
        state = RunState(
            self.position,
            self.account,
            self.states,
            self.team.versions,
            self.session.precisions(),
            self.session.references(),
            self.history.as_state(),
            self.inputs.as_record(),
            self.run.log.mark(),
        )
        progress, told = state.as_progress(), None if record is None else encode_record(record)
        aside = None if meanwhile is None or updated is None else learner(updated).set_aside()
        of = learner if aside is None else {updated: aside}.__getitem__

        def commit() -> dict[str, str]:
            changed = self.team.names if updated is None else [updated]
            agents = {**self.fingerprints, **{name: of(name).fingerprint() for name in changed}}
            self.run.checkpoints.commit(number, agents, lambda name, folder: of(name).save(folder), progress, told)
            return agents

        if meanwhile is None or aside is None:
            with working("saving"):
                self.fingerprints = commit()
            self.committed = time.perf_counter()
            return None
        self.committed = time.perf_counter()  # what is sampled from now on is not in the commit
        done = work_beside(commit, meanwhile, "saving")
        self.fingerprints = done.found
        return done.raised

    def _begin_or_resume(self, commit: Commit | None) -> Record:
        record = self._begin() if commit is None else self._go_on(commit)
        self.exact = exact_success(self.session, self.team)
        self.session.task.printed.take()  # output from loading and testing; `teamtr check` shows it
        return self._log(record)

    def _begin(self) -> StartRecord:
        with self._timed("test", "testing the grader"):
            told = (*self_test(self.session), *doubts(self.session))
        warnings = (*self.session.task.warnings, *told)
        before_servers(self.session)
        warmed = self._warm_up()
        with self._timed("floors", "noise floors"):
            floors = measure_floors(self.session)
        require_visible(self.session, floors)
        with self._timed("rehearse", "rehearsing memory"):
            self.memory = before_training(self.session)
        self._save(None, updated=None)
        measured = {f.agent: f.noise_floor for f in floors}
        return StartRecord(**self._begun(), floors=measured, warnings=warnings, warmup=warmed)

    def _warm_up(self) -> dict[str, WarmupReport] | None:
        """Warm up before anything is measured about the team. The cost is counted separately from training."""
        if self.session.team_file.warmup.tokens == 0:
            return None
        with self._timed("warmup", "warming up"):
            found = warm_up(self.session)
        for name, report in found.items():
            self.account.updated(name, {"warmup": report.tokens}, {"warmup": report.seconds})
        self.team = self.session.current_team()
        return found

    def _go_on(self, commit: Commit) -> ResumeRecord:
        self._resume(commit)
        with self._timed("rehearse", "rehearsing memory"):
            self.memory = before_training(self.session)  # the GPU may have changed, or the model after a swap
        evals = tuple(self.history.success)
        lost = None if self.lost is None else asdict(self.lost)
        return ResumeRecord(**self._begun(), skipped=commit.skipped, changes=self.changes, evals=evals, lost=lost)

    @contextmanager
    def _timed(self, what: str, told: str) -> Iterator[None]:
        began = time.perf_counter()
        with working(told):
            yield
        self.seconds[what] = time.perf_counter() - began

    def _begun(self) -> dict[str, Any]:
        return {
            **self._where(),
            "name": self.session.team_file.name,
            "stages": self.session.plan.stages,
            "agents": tuple(self.session.team.names),
            "trained_agents": len(self.session.team.trainable),
            "samplers": {name: self.session.engine.info(name).sampling for name in self.team.names},
            "precisions": self.session.precisions(),
            "threads": torch.get_num_threads(),
            "memory": self.memory,
            "budget": matched_budget(self.session),
            "seconds": self.seconds,
            "time": time.time(),
        }

    def _resume(self, commit: Commit) -> None:
        folder_of = partial(self.run.checkpoints.folder_of, commit)
        state = RunState.of(commit, folder_of)
        if state.inputs is not None:
            then = Inputs.of_record(state.inputs)
            self.changes = require_same_inputs(then, self.inputs, self.run.path, accept=self.accept_changes)
        began = self.team.versions  # runs of earlier versions name references by these
        self.team = self.session.load(folder_of)
        if self.team.versions != state.versions:
            raise StoreError(f"the weights in {self.run.path} are not those that commit {commit.number} names")
        references = self.session.references()
        known = {name: (version, began[name]) for name, version in references.items()}
        if {*known} != {*state.references} or any(state.references[name] not in known[name] for name in known):
            raise StoreError(
                f"the models that the run in {self.run.path} began with are not those that its team file gives now, "
                "and plan.reference_kl needs them: put the old models back, or begin another run"
            )
        self.account, self.position, self.states = state.account, state.position, dict(state.states)
        self.changes = (*self.changes, *self.session.settle_precisions(state.precisions))
        self.fingerprints = dict(commit.agents)
        self._take_up_log(commit, state)

    def _take_up_log(self, commit: Commit, state: RunState) -> None:
        """Cut the log back to the commit, and report what it has lost."""
        log = self.run.log
        if state.log is not None and (lost := log.lost(state.log)) is not None:
            what = f"has lost {lost} of the {state.log.records} records" if lost else "has other records than those"
            told = f"{log.path.name} {what} that the last commit knows of: figures and reports of this run lack them"
            self.changes = (*self.changes, told)
        elif altered := log.altered():
            lines = ", ".join(map(str, altered[:5]))
            told = f"{log.path.name} is damaged: what was written in line {lines} is other now; figures may be wrong"
            self.changes = (*self.changes, told)
        log.truncate_torn()
        log.rewind(lambda record: updates_before(record) <= commit.number)
        self.history = History(log.records())
        last = None if commit.record is None else decode_record(commit.record)
        is_logged = self.history.updates >= commit.number
        if state.history is not None:
            self.history.take_state(state.history, last)
        if last is not None and not is_logged:
            log.write(last)
            if state.history is None:
                self.history.add(last)
        self._keep_best()

    def _where(self) -> dict[str, int]:
        return {"stage": self.position.stage, "updates": self.position.number}

    # -- evaluation -------------------------------------------------------------------------------------------

    def _evaluate_if_due(self, *, last: bool = False) -> Iterator[Record]:
        settings, stage = self.session.team_file.eval, self.position.stage
        if settings.every == 0 or not (last or stage % settings.every == 0):
            return
        if stage in self.history.evaluated:
            return
        started = time.perf_counter()
        report, ledger = evaluate_team(self.session, self.team, stage=stage)
        tokens, seconds = sum(ledger.sampled_tokens.values()), time.perf_counter() - started
        written = self._log(EvalRecord(**self._where(), report=report, tokens=tokens, seconds=seconds))
        self._keep_best()
        yield written

    def _keep_best(self) -> None:
        """Protect the checkpoint with the highest held-out success from pruning."""
        best = best_of(self.history.held_out)
        self.run.checkpoints.kept = None if best is None else best.updates

    @property
    def _is_out_of_patience(self) -> bool:
        """Whether evaluations have stopped improving, including the one right before this stage. Without that one, it
        is not known what was learned since the previous one."""
        evaluated = self.position.stage in self.history.evaluated
        return evaluated and out_of_patience(self.history.held_out, self.session.team_file.eval.patience)
