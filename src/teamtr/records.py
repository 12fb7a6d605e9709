"""The records of a run's log and those that ``train`` and ``swap`` yield, with the version of the format.

A run writes typed records (``encode_record``) and reads its log back as typed records (``decode_record``). It resumes
only from a log that it understands completely: ``require_known`` refuses a newer version or an unknown kind by name.
Code that only displays a log (report, trackers, figures) uses the plain mappings and reads single fields with
``number``, ``mapping`` and similar functions, because a field may be missing, null, not finite, or of a newer kind.

Versions of the log, from ``log_version`` of its start, resume and swap records:

    1  no version is written
    2  the same records, with the version
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from teamtr.errors import Refused
from teamtr.reports import (
    EvalReport,
    Health,
    HeldOut,
    Interval,
    RewardReport,
    StageReport,
    UpdateReport,
    WarmupReport,
    was_kept,
)
from teamtr.types import Floats

LOG_VERSION = 2
Record = Mapping[str, Any]
"""A record in the form of the log."""


class NewerLog(Refused):
    """The log was written by a newer version of TeamTR, or has records of an unknown kind."""


class RecordError(ValueError):
    """A record lacks a required field or has one of the wrong type."""


_FLAT = {"flat": True}
"""Metadata of a field whose own fields are stored directly in the record."""
_UNVERSIONED = {"absent": 1}
"""Metadata of the version field, which logs of version 1 do not have."""


# -- logged records -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatchedBudget:
    """The sizes that ``plan.match`` set, the run's budget with them, and that of the preset teamtr as reference.

    ``planned`` and ``reference`` count rollouts, messages and updates; numbers decided during the run are missing.
    """

    match: str
    stages: int
    problems: int
    group_size: int
    planned: Mapping[str, int]
    reference: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The first record of a training command: the state of the run, and the hardware and precision it uses."""

    stage: int
    updates: int
    name: str
    stages: int
    agents: tuple[str, ...]
    trained_agents: int
    samplers: Mapping[str, str]
    precisions: Mapping[str, str]
    threads: int
    memory: Mapping[str, Any] | None = None
    budget: MatchedBudget | None = None
    seconds: Mapping[str, float] | None = None
    """Time spent before the first stage, by task: loading models, testing the grader, measuring noise floors,
    rehearsing."""
    time: float
    log_version: int = field(default=LOG_VERSION, metadata=_UNVERSIONED)


@dataclass(frozen=True, kw_only=True)
class StartRecord(Begun):
    """A run began."""

    kind: ClassVar[Literal["start"]] = "start"
    floors: Mapping[str, float]
    """Noise floor of scoring, by agent."""
    warnings: tuple[str, ...] = ()
    warmup: Mapping[str, WarmupReport] | None = None
    """The warm-up of each agent before the first stage; None without one."""


@dataclass(frozen=True, kw_only=True)
class ResumeRecord(Begun):
    """A run resumes."""

    kind: ClassVar[Literal["resume"]] = "resume"
    skipped: tuple[str, ...] = ()
    """Newer commits that were damaged and skipped."""
    changes: tuple[str, ...] = ()
    """Differences from when the run began: inputs, libraries, a log that has lost lines."""
    evals: tuple[float, ...] = ()
    """Success of the evaluations so far."""
    lost: Mapping[str, Any] | None = None
    """Details of an engine that was lost during the run: the reason, and the seconds of work lost with it."""


@dataclass(frozen=True)
class MeasuredGain:
    """The gain of an update as measured by a fresh batch of the same problems."""

    update: int
    estimate: float
    lower: float
    upper: float
    confidence: float
    method: str
    problems: int


@dataclass(frozen=True)
class Redrawn:
    """Statistics of dynamic sampling for a batch; see ``rollout.Collected``."""

    rounds: int
    without_signal: int
    ended: str


@dataclass(frozen=True)
class MeasuredBias:
    """Mean reward of redrawn episodes minus that of new ones of the same problems, with an interval over problems."""

    estimate: float
    lower: float
    upper: float
    problems: int | None = None
    """None in logs of earlier versions."""


@dataclass(frozen=True)
class PartlyRedrawn:
    """The part of a batch that redrawing kept; see ``rollout.redraw``."""

    kept: float
    """Share of the tokens."""
    bias: MeasuredBias | None = None


@dataclass(frozen=True)
class RolloutChoice:
    """Where the episodes of an update came from, and why; see ``training.reuse``."""

    action: str
    reason: str
    share: float | None = None
    needed: float | None = None
    cut: float = 0.0
    """Share of the weights removed by truncation."""
    partly: PartlyRedrawn | None = None


@dataclass(frozen=True, kw_only=True)
class UpdateRecord:
    """One update of one agent, committed."""

    kind: ClassVar[Literal["update"]] = "update"
    update: int
    """Counts the run's updates from 1."""
    stage: int
    step: int
    report: UpdateReport = field(metadata=_FLAT)
    reward: float
    punishment: float | None = None
    dynamic_sampling: Redrawn | None = None
    rollouts: RolloutChoice | None = None
    grader_failures: Mapping[str, int] = field(default_factory=dict)
    protocol_breaches: Mapping[str, int] = field(default_factory=dict)
    success: float
    health: Health | None = None
    """Of the batch and the step; None in logs of earlier versions."""
    rewards: RewardReport | None = None
    """The composition of rewards, and grader output; None if there is nothing to report."""
    exact_success: tuple[float | None, float] | None = None
    """Before the update and after it."""
    measured_before: MeasuredGain | None = None
    """The gain of the previous update, measured on this one's batch."""
    probe: Mapping[str, Any] | None = None
    episodes_total: int
    sampled_tokens_total: int
    time: float


@dataclass(frozen=True)
class StageMemory:
    """GPU memory: planned, and peak in use."""

    planned_gb: float
    peak_gb: float | None


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """A stage is over."""

    kind: ClassVar[Literal["stage"]] = "stage"
    report: StageReport = field(metadata=_FLAT)
    updates: int
    memory: StageMemory | None = None


@dataclass(frozen=True, kw_only=True)
class EvalRecord:
    """The team was evaluated before this stage."""

    kind: ClassVar[Literal["eval"]] = "eval"
    stage: int
    updates: int
    report: EvalReport = field(metadata=_FLAT)
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SwapRecord:
    """An agent was replaced."""

    kind: ClassVar[Literal["swap"]] = "swap"
    updates: int
    stage: int
    agent: str
    mode: str
    certified: bool
    from_: Mapping[str, Any]
    to: Mapping[str, Any]
    protocol: Mapping[str, Any]
    success: Mapping[str, float]
    """By time of measurement: before, at_swap, after."""
    intervals: Mapping[str, Interval]
    shock: float
    direct_shock: float
    alignment: Mapping[str, Any] | None
    floors: Mapping[str, float]
    time: float
    log_version: int = field(default=LOG_VERSION, metadata=_UNVERSIONED)


@dataclass(frozen=True, kw_only=True)
class StoppedRecord:
    """A run was stopped on request, after saving everything."""

    kind: ClassVar[Literal["stopped"]] = "stopped"
    stage: int
    updates: int


@dataclass(frozen=True, kw_only=True)
class FinishedRecord:
    """A run completed all its stages, or was stopped early by ``eval.patience``."""

    kind: ClassVar[Literal["finished"]] = "finished"
    stage: int
    updates: int
    tokens: int
    best: HeldOut | None = None
    """The checkpoint with the highest held-out success, which is kept; None without evaluations."""
    stopped_early: bool = False


# -- records that are yielded and not logged ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrackerRecord:
    """A problem with a tracker."""

    kind: ClassVar[Literal["tracker"]] = "tracker"
    tracker: str
    text: str


@dataclass(frozen=True, kw_only=True)
class ProtocolRecord:
    """The comparison of the protocols of a swap's old and new agent."""

    kind: ClassVar[Literal["protocol"]] = "protocol"
    items: tuple[Mapping[str, Any], ...]
    exact_kl: bool
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SwapEvalRecord:
    """An evaluation during a swap; logged in the swap's journal."""

    kind: ClassVar[Literal["swap_eval"]] = "swap_eval"
    when: str
    report: EvalReport = field(metadata=_FLAT)
    tokens: int


@dataclass(frozen=True, kw_only=True)
class AlignRecord:
    """One check during an alignment; see ``swap.steering.ProbeCheck``."""

    kind: ClassVar[Literal["align"]] = "align"
    trial: int
    step: int
    kl: float
    upper: float
    train_kl: float
    learning_rate: float
    doubled: int
    radius: float | None


LoggedRecord = (
    StartRecord | ResumeRecord | UpdateRecord | StageRecord | EvalRecord | SwapRecord | StoppedRecord | FinishedRecord
)
"""The records that a log may hold; current versions yield the last two without logging them."""
AnyRecord = LoggedRecord | TrackerRecord | ProtocolRecord | SwapEvalRecord | AlignRecord

LOG_KINDS: tuple[str, ...] = tuple(each.kind for each in get_args(LoggedRecord))
_BY_KIND: Mapping[str, type[AnyRecord]] = {each.kind: each for each in get_args(AnyRecord)}


# -- from typed records to plain mappings and back ------------------------------------------------------------


def encode_record(record: AnyRecord) -> dict[str, Any]:
    """The record in the form of the log."""
    values = asdict(record)
    encoded: dict[str, Any] = {"kind": record.kind}
    for each in fields(record):
        value = values[each.name]
        encoded |= value if each.metadata.get("flat") else {each.name.rstrip("_"): value}
    return {key: _as_json_has_it(value) for key, value in encoded.items()}


def decode_record(record: Record) -> AnyRecord:
    """The typed record. Missing fields get their defaults, unknown ones are ignored. Raises RecordError for a missing
    field without a default or a field of the wrong type."""
    kind = record.get("kind")
    if not isinstance(kind, str) or kind not in _BY_KIND:
        raise RecordError(f"its kind is {kind!r}, and the known ones are {', '.join(_BY_KIND)}")
    made: AnyRecord = _build(_BY_KIND[kind], record)
    return made


def encode_report(report: UpdateReport) -> dict[str, Any]:
    """An update's report by itself, as ``encode_record`` writes it."""
    return {key: _as_json_has_it(value) for key, value in asdict(report).items()}


def decode_report(report: Record) -> UpdateReport:
    made: UpdateReport = _build(UpdateReport, report)
    return made


def decode_health(record: Record) -> Health | None:
    """The health of an update, for display; None if the log has none or a damaged one."""
    found = mapping(record, "health")
    try:
        made: Health = _build(Health, found)
    except RecordError:
        return None
    return made


def log_version(records: Iterable[Record]) -> int:
    """The newest format version in this log."""
    return max((found for record in records if (found := whole(record, "log_version"))), default=1)


def unknown_kinds(records: Iterable[Record]) -> list[str]:
    return sorted({str(record.get("kind"))[:40] for record in records} - set(LOG_KINDS))


def require_known(records: Sequence[Record], where: object) -> None:
    """Raise NewerLog unless this version of TeamTR can read the whole log; ``where`` names the log."""
    found, kinds = log_version(records), unknown_kinds(records)
    if found > LOG_VERSION:
        raise NewerLog(
            f"{where} is a log of version {found}, and this TeamTR reads versions 1 to {LOG_VERSION}: use the "
            "TeamTR that wrote it, or a newer one; `teamtr report` shows what it can"
        )
    if kinds:
        raise NewerLog(
            f"{where} holds records of a kind that this TeamTR does not know ({', '.join(kinds[:8])}): use the "
            "TeamTR that wrote them, or a newer one; `teamtr report` shows the others"
        )


def updates_before(record: Record) -> int:
    """The number of updates done when this was logged, including the record's own."""
    found = whole(record, "update")
    return found if found is not None else whole(record, "updates") or 0


def _as_json_has_it(value: Any) -> Any:
    """Converts a tuple to a list, and keys to strings; not recursively."""
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}
    return list(value) if type(value) is tuple else value


@cache
def _types_of(made: Any) -> dict[str, Any]:
    return get_type_hints(made)


def _build(made: Any, found: Record) -> Any:
    values: dict[str, Any] = {}
    for each in fields(made):
        wanted, key = _types_of(made)[each.name], each.name.rstrip("_")
        if each.metadata.get("flat"):
            values[each.name] = _build(wanted, found)
        elif key in found:
            values[each.name] = _typed(wanted, found[key], key)
        elif "absent" in each.metadata:
            values[each.name] = each.metadata["absent"]
        elif each.default is MISSING and each.default_factory is MISSING:
            raise RecordError(f"it has no {key}")
    return made(**values)


def _typed(wanted: Any, value: Any, where: str) -> Any:
    """The value converted to the type of a field; tuples and dataclasses are built from their JSON forms."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if wanted is Any or (origin is Literal and value in inner):
        return value
    if origin in (Union, types.UnionType):
        return _one_of(inner, value, where)
    if wanted is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if wanted is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if wanted in (str, bool, types.NoneType) and isinstance(value, wanted):
        return value
    if isinstance(value, Mapping):
        if origin is Mapping:
            items = value.items()
            return {_key(inner[0], key, where): _typed(inner[1], item, f"{where}.{key}") for key, item in items}
        if is_dataclass(wanted) and isinstance(wanted, type):
            return _build(wanted, value)
    if isinstance(value, list | tuple):
        if origin is tuple:
            every = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
            if len(every) == len(value):
                return tuple(_typed(one, item, where) for one, item in zip(every, value, strict=True))
        named = _types_of(wanted) if isinstance(wanted, type) and issubclass(wanted, tuple) else {}
        if named and len(named) == len(value):
            return wanted(*(_typed(one, item, where) for one, item in zip(named.values(), value, strict=True)))
    raise RecordError(f"its {where} cannot be {str(value)[:60]!r}")


def _one_of(wanted: Sequence[Any], value: Any, where: str) -> Any:
    for each in wanted:
        try:
            return _typed(each, value, where)
        except RecordError as error:
            refused = error
    raise refused


def _key(wanted: Any, key: str, where: str) -> Any:
    try:
        return wanted(key)
    except ValueError as error:
        raise RecordError(f"its {where} has the key {key!r}") from error


# -- single fields of untrusted records -----------------------------------------------------------------------


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record.get("kind") == kind]


def number(record: Any, key: str) -> float | None:
    """The finite number under this key; None if there is none."""
    # Called tens of thousands of times for one page: records are dicts, which isinstance recognizes fast.
    value = record.get(key) if isinstance(record, (dict, Mapping)) else None
    if not isinstance(value, (float, int)) or isinstance(value, bool):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer too large for a float
        return None


def whole(record: Any, key: str) -> int | None:
    value = number(record, key)
    return None if value is None else int(value)


def numbers(values: object) -> Floats:
    """A list of finite numbers as an array; empty if any element is not one."""
    found = [number({"x": value}, "x") for value in values] if isinstance(values, list | tuple) else []
    return np.zeros(0) if None in found else np.array(found, dtype=np.float64)


def mapping(record: Any, key: str) -> Mapping[str, Any]:
    """The mapping under this key; empty if there is none."""
    value = record.get(key) if isinstance(record, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def mappings(record: Any, key: str) -> list[Mapping[str, Any]]:
    """The mappings in the list under this key."""
    value = record.get(key) if isinstance(record, Mapping) else None
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list | tuple) else []


def accepted(update: Record) -> bool:
    return was_kept(update.get("outcome"))
