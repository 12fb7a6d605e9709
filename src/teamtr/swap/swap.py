"""Replaces an agent of a run: checks the protocol, aligns, installs, and leaves a run that ``teamtr train`` continues.

The old run is read and never written. The new folder is filled in atomic steps. ``team.yaml`` is written last, so a
folder without one is an unfinished swap: the same command resumes it and ends with the same bits.

    out/swap/request.json     the request, and the commit that it applies to
    out/swap/model.json       the hashes of the new model
    out/swap/journal.jsonl    finished evaluations
    out/swap/align/           checks of the alignment, removed when everything else is complete
    out/models/               base models that the new run needs and that are stored nowhere else
    then log.jsonl, checkpoints/ and team.yaml, as in any run

Replacing is not certified (prop:pnp): no bound says that the team is as good as before. Later updates are certified.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson

from teamtr.batches import RolloutBatch
from teamtr.chat.tokenizers import compare_tokenizers
from teamtr.config import TeamFile, dumps_stored
from teamtr.errors import Refused, UserError
from teamtr.randomness import seed_of
from teamtr.records import (
    AlignRecord,
    FinishedRecord,
    ProtocolRecord,
    StoppedRecord,
    SwapEvalRecord,
    SwapRecord,
    decode_record,
    encode_record,
    of_kind,
    updates_before,
)
from teamtr.rollout import Ledger, trained_returns_PG
from teamtr.session.build import Session, build
from teamtr.session.checks import measure_floors, require_visible
from teamtr.session.driver import Record
from teamtr.session.export import agent_of
from teamtr.session.history import History
from teamtr.session.inputs import Inputs, ModelId, changes, inputs_of, models_of
from teamtr.session.models import distiller
from teamtr.session.resume import SWAP_REQUEST, StoredRun
from teamtr.session.state import Position, RunState
from teamtr.session.success import evaluate_team
from teamtr.store import Checkpoints, Commit, RunFolder, RunLog, StoreError, read_episodes, write_atomic, write_episodes
from teamtr.store.atomic import discard_folder, make_folder, read_whole, remove_leftovers
from teamtr.store.log import decode, encode, sealed
from teamtr.swap.align import Student, align
from teamtr.swap.checklist import check_protocol, warnings_of
from teamtr.swap.feasibility import achieved, surrogate, text_gap
from teamtr.swap.probes import EXPLORING, Probes, make_probes, play_probes, problems_held_out, problems_to_train
from teamtr.swap.request import Request, new_team_file, require_model
from teamtr.swap.steering import TRIED, Alignment, Progress
from teamtr.swap.strings import compared_strings, context_strings
from teamtr.team import Team
from teamtr.types import AgentState, Problem

T = TypeVar("T")

JUDGED_DOUBLINGS = 3
"""How often the held-out probes are doubled too. Limited, because every check measures all of them."""


class OtherSwap(Refused):
    """The folder already holds another run or swap."""


def swap(run: Path | str, request: Request, out: Path | str) -> Iterator[Record]:
    """Swap into a new folder, or resume the swap in it; yields records as they are made, the swap's record last."""
    source, target_path = Path(run), Path(out)
    _require_apart(source.resolve(), target_path.resolve())
    stored = StoredRun.read(source)
    stored.folder.log.require_known()
    agent_of(stored.team_file, request.agent)
    require_model(request.model, request.revision)
    _require_no_run(RunFolder(target_path))
    with RunFolder.open(target_path) as target:
        if _claim(target, request, source, stored.commit):
            _tidy(target)
            yield from (dict(record) for record in of_kind(target.log.read(), SwapRecord.kind))
            return
        begun = _Swap(stored, target, request)
        _require_same_model(target, request.agent, models_of(begun.new)[request.agent])
        yield from begun.go()


def _require_apart(source: Path, target: Path) -> None:
    """Refuse folders that contain each other: the old run is never touched, and two runs are never mixed."""
    if source == target or source in target.parents or target in source.parents:
        where = "inside" if source in target.parents else "around" if target in source.parents else "the same as"
        raise UserError(f"--out {target} is {where} the run {source}, which is never touched: choose another folder")


def _require_no_run(target: RunFolder) -> None:
    """Refuse a folder that holds a run which is not a swap."""
    if not _request_of(target).exists() and (target.team_file.exists() or target.checkpoints.numbers()):
        raise OtherSwap(f"{target.path} holds a run already; choose another folder for the swap")


def _request_of(target: RunFolder) -> Path:
    return target.path / SWAP_REQUEST


def _tidy(target: RunFolder) -> None:
    """Remove the alignment's checks, which are not needed once ``team.yaml`` exists."""
    looks = target.path / "swap" / "align"
    if looks.exists():
        discard_folder(looks)
    remove_leftovers(looks.parent, recursive=True)


def _claim(target: RunFolder, request: Request, source: Path, commit: Commit) -> bool:
    """Claim the folder for this swap; returns True if the swap is already finished."""
    file, began = _request_of(target), any(_made(target))
    asked = {**request.as_record(), "run": str(source.resolve()), "updates": commit.number, "agents": commit.agents}
    if not file.exists():
        _require_no_run(target)
    if not (file.exists() and began):  # a swap that made nothing yet (e.g. its model failed to load) may be replaced
        write_atomic(file, encode(asked, "request", sort_keys=True))
        return False
    before = _stored(file, dict)
    other = [key for key in asked if before.get(key) != orjson.loads(encode(asked[key], key))]
    if other:
        raise OtherSwap(
            f"{target.path} holds another swap ({', '.join(other)} differ"
            f"{'; the run has gone on since' if 'updates' in other else ''}); choose another folder"
        )
    return target.team_file.exists()


def _require_same_model(target: RunFolder, agent: str, model: ModelId) -> None:
    """Refuse to resume with another model at the same place: what was made so far is of the one before."""
    file = target.path / "swap" / "model.json"
    if not (file.exists() and any(_made(target))):
        write_atomic(file, encode(asdict(model), "model", sort_keys=True))
        return
    then = _stored(file, lambda found: ModelId(**found))
    if found := [change.text for change in changes(Inputs(models={agent: then}), Inputs(models={agent: model}))]:
        raise OtherSwap(
            f"{target.path} holds a swap to another model ({', '.join(found)}): put it back as it was, or choose "
            "another folder"
        )


def _stored(file: Path, read: Callable[[Any], T]) -> T:
    try:
        return read(decode(read_whole(file)))
    except (ValueError, TypeError) as error:
        raise StoreError(f"{file} is damaged ({error}): restore it from a copy, or choose another folder") from error


def _made(target: RunFolder) -> Iterator[Path]:
    """The files in this folder that a swap has made so far and that depend on its request."""
    names = ("team.yaml", "swap/journal.jsonl", "episodes/*", "checkpoints/*")
    return (path for name in names for path in target.path.glob(name))


class _Swap:
    """One swap, with its journal and costs."""

    def __init__(self, stored: StoredRun, target: RunFolder, request: Request) -> None:
        self.source = stored.folder
        self.target = target
        self.request = request
        self.old, self.old_team = stored.build()
        self.commit = stored.commit
        self.seed = self.old.team_file.seed
        self.folder = target.path / "swap"
        remove_leftovers(self.folder, recursive=True)
        self.journal = RunLog(self.folder / "journal.jsonl")
        self.next_stage = int(self.commit.progress["stage"]) + (int(self.commit.progress["done"]) > 0)
        folder_of = partial(self.source.checkpoints.folder_of, self.commit)
        self.state = RunState.of(self.commit, folder_of)
        self.account = deepcopy(self.state.account)
        self.team_file: TeamFile = new_team_file(
            self.old.team_file, request, next_stage=self.next_stage, models=target.path / "models"
        )
        self.new = build(self.team_file)
        self.spent: dict[str, Ledger] = {}
        self._load_kept()

    def go(self) -> Iterator[Record]:
        request = self.request
        batch = self._played("probes", self.old.task.problems("train"), request.probes)
        strings = compared_strings(list(context_strings(batch)))
        codecs: tuple[Any, Any] = (self.old.context.codecs[request.agent], self.new.context.codecs[request.agent])
        tokenizers = compare_tokenizers(codecs[0].tokenizer, codecs[1].tokenizer, strings)
        checklist = check_protocol(self.old, self.new, request.agent, tokenizers, batch)
        yield encode_record(ProtocolRecord(**checklist.as_record(), warnings=tuple(warnings_of(checklist))))
        floors = measure_floors(self.new)  # first, because it sets the precision of alignment
        require_visible(self.new, floors)
        evaluations: dict[str, SwapEvalRecord] = {}
        for when, session, team in (("before", self.old, self.old_team), ("at_swap", self.new, self._new_team())):
            evaluations[when] = self._evaluated(when, session, team)
            yield encode_record(evaluations[when])
        aligned: Record = {}
        if request.mode == "aligned":
            yield from self._align(batch, exact=checklist.exact_kl, into=aligned)
            evaluations["after"] = self._evaluated("after", self.new, self._new_team())
            yield encode_record(evaluations["after"])
        success = {when: record.report.avg_at_k for when, record in evaluations.items()}
        installed = success.get("after", success["at_swap"])
        record = SwapRecord(
            updates=self.commit.number,
            stage=self.next_stage,
            agent=request.agent,
            mode=request.mode,
            certified=False,
            from_={"run": str(self.source.path), "model": self._model(self.old), "version": self.old_team.versions},
            to={"model": self._model(self.new), "version": self._new_team().versions},
            protocol=checklist.as_record(),
            success=success,
            intervals={when: record.report.avg_interval for when, record in evaluations.items()},
            shock=success["before"] - installed,
            direct_shock=success["before"] - success["at_swap"],
            alignment=aligned or None,
            floors={f.agent: f.noise_floor for f in floors},
            time=time.time(),
        )
        self._install(record)
        yield encode_record(record)

    # -- steps ------------------------------------------------------------------------------------------------

    def _load_kept(self) -> None:
        """Loads all other agents, unless they restart from their initial weights, and sets the run's precisions."""
        for name, precision in self.state.precisions.items():
            self.old.engine.set_precision(name, precision)
            if name != self.request.agent and self.request.mode != "reset":
                self.new.engine.learner(name).load(self.source.checkpoints.folder_of(self.commit, name))
                self.new.engine.set_precision(name, precision)

    def _new_team(self) -> Team:
        return self.new.current_team()

    def _model(self, session: Session) -> str:
        return next(a.model for a in session.team_file.team.agents if a.name == self.request.agent)

    def _played(
        self, part: str, problems: Sequence[Problem], probes: int, *, temperature: float | None = None
    ) -> RolloutBatch:
        """Conversations of the current team, played once and stored."""
        file = self.target.episodes / f"swap-{part}.jsonl.gz"
        if not file.exists():
            agent, team = self.request.agent, self.old_team
            played = play_probes(self.old, team, agent, problems, probes, part=part, temperature=temperature)
            write_episodes(file, played)
        batch = read_episodes(file)
        self.spent[part] = _spent(batch)
        return batch

    def _evaluated(self, when: str, session: Session, team: Team) -> SwapEvalRecord:
        """Held-out success, from the journal if already measured. All evaluations use the same problems and noise."""
        for made in self.journal.records():
            if isinstance(made, SwapEvalRecord) and made.when == when:
                return made
        report, ledger = evaluate_team(
            session,
            team,
            stage=self.next_stage,
            problems=self.request.eval_problems,
            samples=self.request.eval_samples,
        )
        record = SwapEvalRecord(when=when, report=report, tokens=sum(ledger.sampled_tokens.values()))
        self.journal.write(record)
        return record

    def _align(self, batch: RolloutBatch, *, exact: bool, into: Record) -> Iterator[Record]:
        """Distill; stores the results in ``into`` (app:diagnostics, plug-in feasibility)."""
        agent, settings = self.request.agent, self._alignment(exact)
        learner = self.new.engine.learner(agent)
        own = distiller(self.new.engine, self.old.engine, agent)
        student = Student(own, lambda k: self._probes(batch, exact, k))
        make_folder(self.folder / "align")
        store = Checkpoints(self.folder / "align")
        for seen in align(student, settings, store):
            yield encode_record(AlignRecord(**asdict(seen), radius=settings.radius))
        commit = store.latest()
        assert commit is not None
        into.update(achieved(student, Progress.of(commit.progress), settings))
        into.update(self._feasibility(student, batch, settings) if exact else self._other_spelling(student))
        own.end()
        learner.restore(learner.snapshot())  # the student changed the same policy: invalidate the cached version
        learner.end()

    def _alignment(self, exact: bool) -> Alignment:
        request, plan, learner = self.request, self.new.plan, self.team_file.learner
        rates = tuple(learner.learning_rate * factor for factor in TRIED)
        return Alignment(
            rates=rates if request.learning_rate is None else (request.learning_rate,),
            radius=plan.radii.nats if exact else None,
            per_token=plan.radii.per_token,
            confidence=learner.confidence,
            batch=request.batch,
            check_every=request.check_every,
            max_steps=request.max_steps,
            doublings=request.doublings,
            seed=seed_of(self.seed, "swap", request.agent),
        )

    def _probes(self, batch: RolloutBatch, exact: bool, doubled: int) -> Probes:
        """The probes after ``doubled`` doublings, which add training probes at a higher temperature, and held-out
        probes at the usual one, since one unlikely message of the old agent dominates the mean over a hundred."""
        probes = self._viewed([batch], exact)
        if doubled == 0:
            return probes
        learnt, judged = problems_to_train(batch, probes), problems_held_out(batch, probes)
        more, judges = [], []
        for k in range(1, doubled + 1):
            count = self.request.probes * 2 ** (k - 1)
            more.append(self._played(f"probes-{k}", learnt, count, temperature=EXPLORING))
            if k <= JUDGED_DOUBLINGS:
                judges.append(self._played(f"judges-{k}", judged, len(probes.held_out) * 2 ** (k - 1)))
        return self._viewed([batch, *more], exact, judges)

    def _viewed(self, batches: Sequence[RolloutBatch], exact: bool, judges: Sequence[RolloutBatch] = ()) -> Probes:
        request = self.request
        return make_probes(
            batches,
            self.new.team[request.agent],
            self.new,
            exact=exact,
            probes=request.probes,
            held_out=request.held_out,
            seed=self.seed,
            judges=judges,
        )

    def _feasibility(self, student: Student, batch: RolloutBatch, settings: Alignment) -> Record:
        """The surrogate on held-out probes, and a check on conversations that were not used for steering."""
        plan, rows = self.new.plan, student.probes.held_out
        rows = rows[rows < student.probes.usual]  # from the first conversations, which the rewards belong to
        advantages = plan.advantage.estimate(trained_returns_PG(batch, plan, self.old_team.limits))
        advantages_M = advantages.values_PG.reshape(-1)[student.probes.old.episode_M[rows]]
        found = surrogate(student.learner.measure(rows), advantages_M)
        unseen = self._played("unseen", self.old.task.problems("test"), max(2, len(rows)))
        probes = self._viewed([unseen], exact=True)
        other = Student(student.learner, lambda _: probes)
        other.use_probes(0)
        kl, upper = other.bound(np.arange(len(probes.new)), settings)
        return {"surrogate": found, "unseen": {"messages": len(probes.new), "kl": kl, "kl_upper": upper}}

    def _other_spelling(self, student: Student) -> Record:
        note = "the two spell differently: no exact KL exists, and no radius was applied"
        room, longest = self.new.team[self.request.agent].max_tokens, int(student.probes.new.lengths_M.max())
        if longest > room:
            note += f"; the old agent's longest message takes {longest} of the new one's tokens, max_tokens is {room}"
        return {"text_gap": asdict(text_gap(student)), "note": note}

    # -- the new run ------------------------------------------------------------------------------------------

    def _install(self, record: SwapRecord) -> None:
        """Writes the old run's log with the swap at its end, one commit, and last the team file; then removes the
        alignment's checks."""
        number = self.commit.number
        past = [
            r
            for r in self.source.log.read()
            if updates_before(r) <= number and r["kind"] not in (FinishedRecord.kind, StoppedRecord.kind)
        ]
        lines = b"".join(sealed(encode(r, "record")) + b"\n" for r in [*past, encode_record(record)])
        write_atomic(self.target.path / "log.jsonl", lines)
        for part in sorted(self.spent):
            self.account.probed(self.spent[part])  # no update learns from them
        learners = {name: self.new.engine.learner(name) for name in self.new.team.names}
        state = RunState(
            Position(number=number, stage=self.next_stage),
            self.account,
            self._states(),
            self._new_team().versions,
            self.new.precisions(),
            self.new.references(),
            self._history(record),
            inputs_of(self.new).as_record(),
        )
        self.target.checkpoints.commit(
            number,
            {name: learner.fingerprint() for name, learner in learners.items()},
            lambda name, folder: learners[name].save(folder),
            state.as_progress(),
        )
        write_atomic(self.target.team_file, dumps_stored(self.team_file, self.target.path).encode())
        _tidy(self.target)

    def _history(self, swap: SwapRecord) -> dict[str, Any] | None:
        if self.state.history is None:
            return None
        history = History()
        record = self.commit.record
        history.take_state(self.state.history, None if record is None else decode_record(record))
        history.add(swap)
        return history.as_state()

    def _states(self) -> dict[str, AgentState]:
        """Kept agents keep their states; the new one, or all agents with mode "reset", start with initial states."""
        states = dict.fromkeys(self.new.team.names, self.new.plan.first_state())
        if self.request.mode != "reset":
            states |= {name: state for name, state in self.state.states.items() if name != self.request.agent}
        return states


def _spent(batch: RolloutBatch) -> Ledger:
    """The cost of the probes, from the episodes themselves, so that it does not depend on interruptions."""
    ledger = Ledger(episodes=len(batch.episodes))
    for episode in batch.episodes:
        for turn in episode.turns:
            ledger.add(turn.agent, len(turn.context_ids), len(turn.token_ids), 0.0)
    return ledger
