"""Every record of the log comes back as it was written, and nothing else decides what an outcome means."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import pytest

from teamtr.records import (
    LOG_KINDS,
    LOG_VERSION,
    AlignRecord,
    AnyRecord,
    EvalRecord,
    FinishedRecord,
    MeasuredGain,
    NewerLog,
    ProtocolRecord,
    RecordError,
    Redrawn,
    ResumeRecord,
    StageMemory,
    StageRecord,
    StartRecord,
    StoppedRecord,
    SwapEvalRecord,
    SwapRecord,
    TrackerRecord,
    UpdateRecord,
    decode_record,
    encode_record,
    log_version,
    require_known,
    updates_before,
)
from teamtr.reports import (
    KEPT,
    SKIPPED,
    Certificate,
    EvalReport,
    Health,
    Interval,
    LabelScores,
    MeanInterval,
    MessageHealth,
    Outcome,
    RewardReport,
    StageReport,
    UpdateReport,
    was_kept,
    was_skipped,
)
from teamtr.rollout.cost import Account
from teamtr.session.history import History
from teamtr.session.state import Position, RunState
from teamtr.store import Commit, Log, LogMark, RunFolder, RunLog, StoreError
from teamtr.store.log import decode, encode
from teamtr.types import AgentState

SOURCE = Path(__file__).parents[2] / "src" / "teamtr"
OLD_RUN = Path(__file__).parents[1] / "fixtures" / "old_run"
INTERVAL = Interval(0.25, 0.75)
CERTIFICATE = Certificate("turn_aware", {"surrogate": 0.5, "occupancy": -0.125}, 0.375)
BEGUN = {
    "stage": 1,
    "updates": 3,
    "name": "a run",
    "stages": 4,
    "agents": ("left", "right"),
    "trained_agents": 2,
    "samplers": {"left": "plain fp32", "right": "paged"},
    "precisions": {"left": "fp32", "right": "bf16"},
    "threads": 2,
    "memory": {"planned_gb": 2.5, "peak_gb": 2.25},
    "time": 12.5,
}
EVALUATION = EvalReport(
    problems=2,
    samples=4,
    confidence=0.95,
    avg_at_k=0.5,
    avg_interval=INTERVAL,
    pass_at_k={1: 0.5, 4: 1.0},
    pass_intervals={1: INTERVAL, 4: Interval(1.0, 1.0)},
    majority_at_k=0.5,
    majority_interval=INTERVAL,
    consensus_on_correct=None,
    mean_reward=0.625,
    reward_interval=INTERVAL,
    rewards_non_finite=1,
    verdicts={"right": 4, "wrong": 4},
    success_P=(1.0, 0.0),
    problem_ids=("a", "b"),
    tables={"size": {"2*2": LabelScores(2, 0.5, INTERVAL, 1.0)}},
    measures={"length": MeanInterval(3.5, Interval(3.0, 4.0))},
    pass_hat_k={1: 0.5, 4: 0.25},
    pass_hat_intervals={1: INTERVAL, 4: Interval(0.0, 0.5)},
)
MESSAGES = MessageHealth(16, None, 3.5, 6.0, 2, 7, 0.125, None, None, 0.25)
REPORT = UpdateReport(
    agent="left",
    outcome="accepted_unverifiable",
    reason="inside",
    radius=0.1,
    unit="token",
    kl_rejected=0.25,
    certificates=(CERTIFICATE, replace(CERTIFICATE, kind="single_step")),
    tokens={"score": 7},
    seconds={"score": 0.5},
)


def update(number: int = 4, stage: int = 1, **values: object) -> UpdateRecord:
    filled = {"reward": 0.5, "success": 0.25, "episodes_total": 8, "sampled_tokens_total": 64, "time": 1.5, **values}
    return UpdateRecord(**{"update": number, "stage": stage, "step": 0, "report": REPORT, **filled})


def evaluation(stage: int, success: float = 0.5) -> EvalRecord:
    return EvalRecord(stage=stage, updates=3, report=replace(EVALUATION, avg_at_k=success), tokens=9, seconds=0.5)


EVERY_KIND: list[AnyRecord] = [
    StartRecord(**BEGUN, floors={"left": 1e-9, "right": 0.0}, warnings=("few problems",)),
    ResumeRecord(**BEGUN, skipped=("commit 7 was passed over",), evals=(0.25, 0.5)),
    update(),
    update(
        punishment=-0.125,
        dynamic_sampling=Redrawn(2, 1, "limit"),
        grader_failures={"timeout": 2},
        protocol_breaches={"tag": 1},
        exact_success=(0.25, 0.5),
        measured_before=MeasuredGain(3, 0.125, 0.0, 0.25, 0.95, "t", 8),
        probe={"token_shift": {"moved_R": [0.5, 0.25]}, "seconds": 0.5},
        health=Health(MESSAGES, {"left": MESSAGES}, 8, 0.25, 0.125, 0.0, 0.5, 0.5, None),
        rewards=RewardReport({"right": 0.5}, {"left": 0.25}, "a line"),
    ),
    StageRecord(report=StageReport(1, 3, 2, (CERTIFICATE,), 0.5, 0.25), updates=6, memory=StageMemory(2.5, None)),
    evaluation(1),
    SwapRecord(
        updates=6,
        stage=2,
        agent="right",
        mode="aligned",
        certified=False,
        from_={"run": "run", "model": "tiny", "version": {"right": "ab"}},
        to={"model": "other", "version": {"right": "cd"}},
        protocol={"items": [{"point": "token ids", "ok": True, "note": ""}], "exact_kl": True},
        success={"before": 0.5, "at_swap": 0.25},
        intervals={"before": INTERVAL, "at_swap": INTERVAL},
        shock=0.25,
        direct_shock=0.25,
        alignment={"radius": 0.1, "curve": [{"kl": 0.5}]},
        floors={"right": 0.0},
        time=2.5,
    ),
    StoppedRecord(stage=1, updates=4),
    FinishedRecord(stage=4, updates=12, tokens=1000),
    TrackerRecord(tracker="wandb", text="it hangs"),
    ProtocolRecord(items=({"point": "token ids", "ok": True},), exact_kl=True, warnings=("none",)),
    SwapEvalRecord(when="before", report=EVALUATION, tokens=9),
    AlignRecord(trial=0, step=25, kl=0.5, upper=0.75, train_kl=0.25, learning_rate=1e-4, doubled=1, radius=None),
]


# -- there and back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", EVERY_KIND, ids=lambda record: record.kind)
def test_every_kind_comes_back(record):
    line = encode(encode_record(record), "record")
    assert decode_record(decode(line)) == record
    assert encode(encode_record(decode_record(decode(line))), "record") == line, "to the byte"


def test_every_kind_is_tried():
    assert {type(record) for record in EVERY_KIND} == set(get_args(AnyRecord))
    assert {*LOG_KINDS} == {"start", "resume", "update", "stage", "eval", "swap", "stopped", "finished"}


def test_a_run_log_writes_and_reads_typed_records(tmp_path):
    log = RunLog(tmp_path / "log.jsonl")
    written = [log.write(record) for record in EVERY_KIND]
    assert [record["kind"] for record in written] == [record.kind for record in EVERY_KIND]
    assert log.read() == [decode(encode(record, "record")) for record in written]
    assert log.records() == EVERY_KIND


def test_a_reward_that_is_no_number_stays_one():
    found = decode_record(decode(encode(encode_record(update(reward=math.nan)), "record")))
    assert isinstance(found, UpdateRecord)
    assert math.isnan(found.reward)


def test_what_is_new_is_left_out_and_what_is_missing_has_its_default():
    record = encode_record(update(punishment=-0.5)) | {"a_newer_field": {"x": [1]}}
    del record["punishment"], record["kl_reference"], record["groups_aside"]
    assert decode_record(record) == update()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"outcome": "accepted_by_acclaim"}, "outcome.*accepted_by_acclaim"),
        ({"surrogate": None}, "surrogate.*None"),
        ({"kl_full": "0.1"}, "kl_full"),
        ({"update": 1.5}, "update"),
        ({"update": True}, "update"),
        ({"certificates": "elsewhere"}, "certificates"),
        ({"certificates": [{"kind": "turn_aware"}]}, "no terms"),
        ({"exact_success": [0.5]}, "exact_success"),
        ({"measured_before": 7}, "measured_before"),
        ({"tokens": {"score": "many"}}, r"tokens\.score"),
        ({"kind": "telepathy"}, "telepathy"),
        ({"kind": ["update"]}, "kind"),
    ],
)
def test_a_record_of_another_form_is_named(tmp_path, change, told):
    damaged = encode_record(update()) | change
    with pytest.raises(RecordError, match=told):
        decode_record(damaged)
    log = RunLog(tmp_path / "log.jsonl")
    log.write(update())
    log.append(damaged)
    with pytest.raises(StoreError, match=rf"log\.jsonl, line 2 .*{told}"):
        log.records()


def test_a_record_without_what_it_needs_is_named():
    record = encode_record(update())
    del record["agent"]
    with pytest.raises(RecordError, match="no agent"):
        decode_record(record)


# -- versions -------------------------------------------------------------------------------------------------


def test_what_begins_a_log_or_goes_on_with_it_carries_the_version():
    versions = {record.kind: encode_record(record).get("log_version") for record in EVERY_KIND}
    assert {kind for kind, version in versions.items() if version is not None} == {"start", "resume", "swap"}
    assert versions["start"] == versions["resume"] == versions["swap"] == LOG_VERSION


def test_a_log_without_a_version_is_of_version_one():
    old = {key: value for key, value in encode_record(EVERY_KIND[0]).items() if key != "log_version"}
    found = decode_record(old)
    assert isinstance(found, StartRecord)
    assert found.log_version == log_version([old]) == log_version([]) == 1
    assert log_version([old, encode_record(EVERY_KIND[1])]) == LOG_VERSION
    assert log_version([{"kind": "start", "log_version": "x"}]) == 1


def test_a_newer_log_is_refused_by_name():
    require_known([{"kind": kind} for kind in LOG_KINDS], "log")
    newer = [{"kind": "start", "log_version": LOG_VERSION + 1}, {"kind": "telepathy"}]
    with pytest.raises(NewerLog, match=rf"here is a log of version {LOG_VERSION + 1}.*versions 1 to {LOG_VERSION}"):
        require_known(newer, "here")
    with pytest.raises(NewerLog, match=r"here .*telepathy"):
        require_known(newer[1:], "here")
    assert NewerLog.exit_code == 3


# -- what a run remembers of its log --------------------------------------------------------------------------


def test_history_is_that_of_the_log():
    other = replace(REPORT, agent="right")
    records = [
        evaluation(0, 0.25),
        update(1, 0, report=replace(REPORT, surrogate=1.0)),
        update(2, 0, report=other),
        StageRecord(report=StageReport(0, 2, 2), updates=2),
        evaluation(1, 0.75),
        update(3, 1, report=replace(REPORT, surrogate=2.0)),
    ]
    history = History(records)
    assert history.updates == 3
    assert (history.closed, history.evaluated, history.success) == ({0}, {0, 1}, [0.25, 0.75])
    assert [u.update for u in history.of_stage(1)] == [3]
    assert not history.of_stage(2)
    before = {name: report.surrogate for name, report in history.last_updates(1).items()}
    assert before == {"left": 1.0, "right": other.surrogate}, "not the update of the stage itself"
    assert history.last_updates(2)["left"].surrogate == 2.0
    assert list(history.last_updates(2)) == ["left", "right"]


def test_a_commit_stores_every_part_of_a_run_s_state_and_gives_it_back():
    """No part has its default, so that one which is forgotten shows."""
    position = Position(
        number=7, stage=2, done=1, batch="stage-2", reused={"redrawn": True}, past={"batch": "stage-1", "problems": []},
        carried=[0.5], returns=[[1.0, 0.0]], sampling_cost=2.5,
    )  # fmt: skip
    state = RunState(
        position,
        Account(3, {"a": {"sampled": 4}}, {"a": {"sample": 0.5}}),
        {"a": AgentState(beta=1.0, step_scale=0.5, radius_nats=0.1, updates=2)},
        {"a": "version"},
        {"a": "fp32"},
        {"a": "reference"},
        {"last": {"a": 1}},
        {"task": "hash"},
        LogMark(5, 600, "hash"),
    )
    for part in (position, state):
        assert not [f.name for f in fields(part) if getattr(part, f.name) == f.default], "give it a value of its own"
    stored = decode(encode(state.as_progress(), "progress"))
    assert RunState.of(Commit(7, {"a": "version"}, stored, None, {}), Path) == state


def test_updates_before_a_record():
    assert updates_before(encode_record(update(7))) == 7
    assert updates_before(encode_record(StoppedRecord(stage=1, updates=4))) == 4
    assert updates_before({"kind": "telepathy"}) == updates_before({"update": None}) == 0


# -- the run of the version before ----------------------------------------------------------------------------


NEWER = (
    "log_version",
    "changes",
    "rollouts",
    "budget",
    "critic",
    "pass_hat_k",
    "pass_hat_intervals",
    "lost",
    "health",
    "warmup",
    "rewards",
    "mismatch_kl",
    "sampler_scored",
    "own_scores",
)
"""Fields that logs of version 1 do not have."""


def test_every_record_of_an_old_run_is_known():
    store = RunFolder.read(OLD_RUN)
    store.log.require_known()
    assert log_version(store.log.read()) == 1
    for old, found in zip(store.log.read(), store.log.records(), strict=True):
        again = decode(encode(encode_record(found), "record"))
        newer = NEWER if "seconds" in old else (*NEWER, "seconds")  # older than those of a start
        assert {key: value for key, value in again.items() if key not in newer} == old
    journal = RunLog(OLD_RUN / "swap" / "journal.jsonl").records()
    assert [record.when for record in journal if isinstance(record, SwapEvalRecord)] == ["before", "at_swap"]


# -- outcomes -------------------------------------------------------------------------------------------------


def test_kept_and_skipped_by_hand():
    outcomes = get_args(Outcome)
    assert [o for o in outcomes if was_kept(o)] == ["accepted", "accepted_unverifiable"]
    assert [o for o in outcomes if not (was_kept(o) or was_skipped(o))] == ["restored"]
    assert not KEPT & SKIPPED
    assert {*outcomes} >= KEPT | SKIPPED
    for damaged in (None, "", "accept", "accepted_by_acclaim", ["accepted"], 1):
        assert not was_kept(damaged)
        assert not was_skipped(damaged)


def prefix_tests(source: str) -> list[int]:
    """Lines of Python that ask whether text begins as an outcome does."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("startswith", "removeprefix")
        for text in ast.walk(ast.Module([ast.Expr(each) for each in node.args], []))
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and len(text.value) > 2
        if any(outcome.startswith(text.value) for outcome in get_args(Outcome))
    ]


@pytest.mark.long
def test_nobody_compares_outcomes_by_their_beginning():
    assert prefix_tests('x["outcome"].startswith("accepted")\ny.startswith(("a", "skip"))\nz.startswith("$")') == [1, 2]
    found = {file: prefix_tests(file.read_text()) for file in SOURCE.rglob("*.py")}
    assert {file: lines for file, lines in found.items() if lines} == {}
    scripts = {file: re.findall(r"outcome\.startsWith", file.read_text()) for file in SOURCE.rglob("*.js")}
    assert scripts
    assert not any(scripts.values())


def test_runs_write_typed_records_only():
    """``Log.append`` takes any mapping; in the library only the typed writer calls it."""
    calls = {file: re.findall(r"(?:log|journal)\.append\(", file.read_text()) for file in SOURCE.rglob("*.py")}
    assert not any(calls.values())
    assert RunLog.append is Log.append
