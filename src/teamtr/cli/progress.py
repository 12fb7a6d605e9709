"""Progress of training for the user: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from teamtr.cli.words import clock, health_line, lengths, percent, signals, warmup_line
from teamtr.records import decode_health, mapping
from teamtr.reports import NOTHING_KEPT, Health, was_skipped
from teamtr.text import counted, on_terminal, share
from teamtr.training.advice import advise, untaught_share

PRINTED_LINES = 5
"""Maximum lines of a grader's output that are shown with an update."""

if TYPE_CHECKING:
    from teamtr.cli.works import Works

Record = dict[str, Any]
BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Iterable[float], low: float = 0.0, high: float = 1.0) -> str:
    """Values as a row of block characters."""
    span = max(high - low, 1e-12)
    return "".join(BLOCKS[min(7, max(0, int((v - low) / span * 8)))] for v in values)


class TrainingScreen:
    """Shows the records of a run as they arrive."""

    def __init__(self, *, label: str = "", works: Works | None = None) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.live: Live | None = None
        self.works = works
        self.label = f"{label} " if label else ""
        self.stages = 0
        self.trained = 0
        self.failures: set[str] = set()
        self.advised: set[str] = set()
        self.over_plan = False
        self.evals: list[float] = []
        self.agents: dict[str, Record] = {}
        self.first: tuple[float, int, int] | None = None  # time, updates, tokens at the first update shown

    def __enter__(self) -> TrainingScreen:
        if self.console.is_terminal:
            self.live = Live(self.works or "", console=self.console, refresh_per_second=8, transient=True)
            self._host(True)
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.stop()
            self._host(False)

    def _host(self, hosts: bool) -> None:
        """Two live screens would overwrite each other."""
        if self.works is not None:
            self.works.is_hosted = hosts

    def watch(self, records: Iterable[Record]) -> Iterator[Record]:
        """Show each record and yield it."""
        for record in records:
            self._show(record)
            yield record

    def _show(self, record: Record) -> None:
        match record["kind"]:
            case "start" | "resume":
                self.stages = record["stages"]
                self.trained = record["trained_agents"]
                self.evals = list(record.get("evals", ()))
                if lost := record.get("lost"):
                    self._print(f"warning: {lost['why']}; {lost['seconds']:.0f} s of work are done again")
                verb = (
                    "training"
                    if record["kind"] == "start"
                    else f"resuming after {counted(record['updates'], 'update')}"
                )
                paths = ", ".join(sorted(set(record["samplers"].values())))
                self._print(f"{self.label}{verb}: {record['name']}, {', '.join(record['agents'])} (sampling: {paths})")
                for agent, warmed in (record.get("warmup") or {}).items():
                    self._print(f"{self.label}{warmup_line(agent, warmed)}")
                told = (record.get(key, ()) for key in ("skipped", "changes", "warnings"))
                for warning in itertools.chain.from_iterable(told):
                    self._print(f"warning: {warning}")
            case "eval":
                self.evals.append(record["avg_at_k"])
                self._print(
                    f"{self.label}stage {record['stage']:>3}/{self.stages}  held-out success "
                    f"{share(record['avg_at_k'], record['avg_interval'])}  {sparkline(self.evals)}"
                )
            case "update":
                self._update(record)
            case "stage":
                memory = record["memory"]
                if memory and (memory["peak_gb"] or 0.0) > memory["planned_gb"] and not self.over_plan:
                    self.over_plan = True
                    self._print(
                        f"warning: {memory['peak_gb']:.3g} GB of GPU memory were used, but `teamtr plan` "
                        f"expected {memory['planned_gb']:.3g}"
                    )
            case "tracker":
                self._print(f"warning: {record['text']}")
            case "stopped":
                self._print(f"stopped after update {record['updates']}, saved; the same command resumes")

    def _update(self, record: Record) -> None:
        self.agents[record["agent"]] = record
        for why in record["grader_failures"].keys() - self.failures:
            self.failures.add(why)
            self._print(f"warning: the grader failed: {why}")
        self._tell_printed(record)
        health = decode_health(record)
        self._advise(health, record)
        self._tell_own_scores(record)
        now = time.monotonic()
        if self.first is None:
            self.first = (now, record["update"], record["sampled_tokens_total"])
            rate, eta = "", ""
        else:
            seconds = max(now - self.first[0], 1e-9)
            updates = record["update"] - self.first[1]
            sampled = record["sampled_tokens_total"] - self.first[2]
            rate = f"{sampled / seconds:,.0f} tokens/s" if sampled else ""
            left = self.stages * self.trained - record["update"]
            eta = f"ETA {clock(seconds / max(updates, 1) * max(left, 0))}"
        if self.live is not None:
            table = self._table(rate, eta)
            self.live.update(table if self.works is None else Group(table, self.works))
        else:
            kl = "-" if was_skipped(record["outcome"]) else f"{record['kl_upper']:.4f}"
            told = (
                f"stage {record['stage'] + 1:>3}/{self.stages}  {record['agent']:<8} {record['outcome']:<17} "
                f"KL {kl:<6} of {record['radius']:.3g}  {_rollouts(record):<8}  success {percent(record['success'])}  "
                f"reward {record['reward']:.3f}  {health_line(health, record['agent'])}  {rate}  {eta}"
            )
            self._print(f"{self.label}{told.rstrip()}")

    def _tell_printed(self, record: Record) -> None:
        """Print the first lines of the grader's output; all that is kept of it is in the log and the report."""
        lines = str(mapping(record, "rewards").get("printed", "")).splitlines()
        for line in lines[:PRINTED_LINES]:
            self._print(f"reward: {line}")
        if len(lines) > PRINTED_LINES:
            self._print(f"reward: ... {len(lines) - PRINTED_LINES} more lines in the log and the report")

    def _advise(self, health: Health | None, record: Record) -> None:
        """Print each advice once, since the figures are in every line."""
        for advice in () if health is None else advise(health, record["agent"], untaught_share(record)):
            if advice.about not in self.advised:
                self.advised.add(advice.about)
                self._print(f"advice: {advice.text}")

    def _tell_own_scores(self, record: Record) -> None:
        """Warn once if ``learner.score: sampler`` is set but its scores are not used. Not if none were kept, which is
        usual where rollouts are reused."""
        why = record.get("own_scores", "")
        if why and why != NOTHING_KEPT and "own scores" not in self.advised:
            self.advised.add("own scores")
            self._print(
                f"warning: learner.score is sampler, but the learner scores {record['agent']}'s messages itself: "
                f"{why}. A finer sampling.precision or a larger radius would do; learner.score: own saves the try"
            )

    def _table(self, rate: str, eta: str) -> Table:
        table = Table(box=None, padding=(0, 1), show_edge=False)
        titles = ("agent", "stage", "reward", "KL/radius", "", "rollouts", "backtracks", "messages", "outcome")
        for title in titles:
            table.add_column(title, no_wrap=True, style="dim" if title == "outcome" else "")
        health: Health | None = None
        for name, r in self.agents.items():
            share = r["kl_upper"] / r["radius"] if r["radius"] else 0.0
            table.add_row(
                escape(on_terminal(name)),
                f"{r['stage'] + 1}/{self.stages}",
                f"{r['reward']:.3f}",
                f"{r['kl_upper']:.4f}/{r['radius']:.3g}",
                _bar(share),
                _rollouts(r),
                str(r["backtracks"]),
                lengths(health := decode_health(r), name),
                r["outcome"],
            )
        table.caption = f"{self.label}{signals(health)}   {rate}   {eta}".strip()
        table.caption_justify = "left"
        return table

    def _print(self, line: str) -> None:
        self.console.print(Text(on_terminal(line)), soft_wrap=True)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table; columns are as wide as their content, regardless of the terminal's width."""
    widths = [max(len(row[c]) for row in (header, *rows)) for c in range(len(header))]
    return "\n".join(
        "  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)
    )


def _rollouts(update: Record) -> str:
    """The rollouts of an update: new, redrawn, or old with the share that they were still worth."""
    match update.get("rollouts"):
        case {"action": "sample"}:
            return "new"
        case {"action": "redraw"}:
            return "redrawn"
        case {"action": "reuse", "share": float(worth)}:
            return f"old {percent(worth)}"
        case {"action": "reuse"}:
            return "old"
    return ""


def _bar(share: float, width: int = 12) -> str:
    """A bar of this share, full from 1 on and where it is not a number: a plan without a gate keeps any step."""
    filled = round(max(0.0, share) * width) if share < 1.0 else width
    return "█" * filled + "·" * (width - filled)
