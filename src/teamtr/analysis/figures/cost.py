"""Figures of the cost of runs (tab:compute-lite): tokens against naive sequential training, and seconds by phase."""

from __future__ import annotations

from collections.abc import Sequence

from teamtr.analysis.figures.drawing import Drawing, Panel, Series
from teamtr.analysis.figures.runs import Run, need


def accounting(runs: Sequence[Run]) -> Drawing:
    spent = [run for run in runs if run.data["cost"]["sampled_tokens"]]
    need(spent, "no update is in the log", "train for at least one update")
    places = tuple(map(float, range(len(spent))))
    names = tuple(run.label for run in spent)
    overheads = [run.data["cost"]["overhead"] for run in spent]
    tokens = (
        Series("sampled", places, tuple(o["sampled_tokens"] / 1e6 for o in overheads), kind="bars"),
        Series("naive sequential would sample", places, tuple(o["naive_tokens"] / 1e6 for o in overheads), kind="bars"),
    )
    phases = sorted({p for run in spent for by in run.data["cost"]["seconds"].values() for p in by})
    seconds = tuple(
        Series(
            phase,
            places,
            tuple(sum(by.get(phase, 0.0) for by in run.data["cost"]["seconds"].values()) / 60 for run in spent),
            kind="bars",
        )
        for phase in phases
    )
    told = [
        f"{run.label}: {o['token_ratio']:.2f} times the tokens of naive sequential training"
        for run, o in zip(spent, overheads, strict=True)
        if o["token_ratio"] is not None
    ]
    partial = [f"{run.label}: without the seconds of sampling (no readable commit)" for run in spent
               if not run.data["cost"]["complete"]]  # fmt: skip
    read = tuple(sum(by.get("prompt", 0.0) for by in run.data["cost"]["tokens"].values()) / 1e6 for run in spent)
    everything = tuple(prompts + o["sampled_tokens"] / 1e6 for prompts, o in zip(read, overheads, strict=True))
    whole = (
        Series("prompts and messages (millions of tokens)", places, everything, kind="bars"),
        Series("rollouts (thousands)", places, tuple(run.data["cost"]["episodes"] / 1e3 for run in spent), kind="bars"),
    )
    panels = (
        Panel("sampled tokens", "run", "tokens (millions)", tokens, names=names),
        Panel("prompts too, and rollouts", "run", "as named", whole, names=names),
        Panel("time", "run", "minutes, all agents", seconds, names=names),
    )
    return Drawing(
        tuple(panel for panel in panels if panel.series),
        "Tokens sampled for training, beside what the same run would sample once a stage; all tokens that were read or "
        "written in rollouts, and the number of rollouts, as tab:compute-lite counts; minutes by phase.",
        "an overhead in tokens that success repays (learning-curves), and time that goes into sampling and training",
        (*told, *partial),
    )
