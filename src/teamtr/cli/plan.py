"""``teamtr plan``: predict memory and time, on this machine or another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from teamtr.cli.common import JsonFlag, Overrides, answer, app, emit, errors, fail, read_team_file
from teamtr.text import counted

if TYPE_CHECKING:
    from teamtr.config import TeamFile
    from teamtr.planning.advice import Placement
    from teamtr.planning.stage import Prediction
    from teamtr.ports import MemoryPlan
    from teamtr.session.build import Session
    from teamtr.session.forecast import Where


@app.command()
def plan(
    team_file: Annotated[Path, typer.Argument(help="The team file (YAML).")],
    overrides: Overrides = None,
    rehearse: Annotated[bool, typer.Option(help="Also run the longest step, and undo it.")] = False,
    card: Annotated[
        str | None, typer.Option(help="Plan for this card, which need not be here: H200, A100-80, ..., or cpu.")
    ] = None,
    cards: Annotated[
        int | None, typer.Option(min=1, help="How many of them (of a CPU: cores); default: one for each worker.")
    ] = None,
    network: Annotated[
        float | None, typer.Option(min=0.001, help="Between machines of 8 cards, in GB/s; default: 25.")
    ] = None,
    message_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a typical message; default: max_tokens.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Estimate the memory that a team needs: weights, KV blocks, optimizer state, the largest step. Also show its
    budget.

    `--rehearse` runs the longest possible step of every agent, except where another agent that fits needs at least as
    much, and compares the plan with the memory used. On a GPU, `teamtr train` does the same when it starts or resumes,
    and logs the peak of every stage next to the plan.

    With `--card`, no weights are loaded and no GPU is needed: memory per worker and seconds per stage are computed from
    the models' config.json and `cluster.*`. It prints what bounds each phase and which settings would help; see
    docs/sizing.md for the accuracy of these predictions.

    It also prints what the run will spend on training (with `plan.match`, next to what the preset teamtr would), the
    trained parameters of every agent, and the LoRA rank at which a single agent would train as many as the team.
    """
    if card is None and (cards or network or message_tokens):
        fail("--cards, --network and --message-tokens need --card: without it, the plan is for this machine", 2)
    if card is not None and rehearse:
        fail("--rehearse needs the card itself, and --card plans for one that need not be here: use one of them", 2)
    with errors():
        settings = read_team_file(team_file, overrides)
        if card is not None:
            from teamtr.session.forecast import Where

            where = Where(card, cards, None if network is None else 1e9 * network, message_tokens)
            _elsewhere(settings, where, as_json)
        else:
            _here(settings, rehearse, as_json)


def _here(settings: TeamFile, rehearse: bool, as_json: bool) -> None:
    """Plan for this machine: models are loaded, counted and measured."""
    from teamtr.session.build import build
    from teamtr.session.memory import plan_memory
    from teamtr.session.memory import rehearse as try_it

    session = build(settings, taught=False)
    planned = plan_memory(session)
    if planned.where:
        answer(f"a worker of {planned.where}, which has least to spare of all groups:", as_json)
    tried = try_it(session) if rehearse else None
    _tell_memory(planned, as_json)
    _tell_sizes(session, as_json)
    if tried is not None:
        peak = "no figure on a CPU" if tried["peak_gb"] is None else f"peak {tried['peak_gb']:.3g} GB"
        sizes = ", ".join(f"{k} {v}" for k, v in tried["micro_batch"].items())
        answer(f"rehearsed: {peak}; messages at a time: {sizes}{_recomputed(tried['recomputed'])}", as_json)
    if as_json:
        emit({**planned.as_record(), "rehearsed": tried, **_sizes(session)})


def _elsewhere(settings: TeamFile, where: Where, as_json: bool) -> None:
    """Plan for another machine from shapes alone; nothing is loaded."""
    from teamtr.planning.advice import helpful, placement
    from teamtr.session.forecast import forecast

    session, found = forecast(settings, where)
    changes, planned, cluster = helpful(found), found.memory.plan, found.setup.cluster
    answer(f"workers: {cluster.workers} on {cluster.cards} x {cluster.card.name}; shards: {cluster.shards}", as_json)
    placed = {group.setup.cluster.name: (group, placement(group)) for group in found.groups or (found,)}
    for group, place in placed.values():
        _tell_group(group, place, as_json)
    _tell_seconds(found, as_json)
    for change in changes:
        does = "fits" if not found.memory.fits else f"{change.ratio:.2f} of the time"
        answer(f"would help: {change.settings} ({does}, {change.seconds:.3g} s a stage)", as_json)
    if not found.memory.fits and not changes:
        answer("no setting of the cluster makes it fit: smaller or fewer models, train: lora, or larger cards", as_json)
    _tell_sizes(session, as_json)
    if as_json:
        record: dict[str, Any] = {
            **planned.as_record(),
            "fits": found.memory.fits,
            "card": cluster.card.name,
            "cards": cluster.cards,
            "workers": cluster.workers,
            "shards": cluster.shards,
            "placement": placed[planned.where][1].as_record(),
            "groups": [_group_record(group, place) for group, place in placed.values() if group is not found],
            "predicted": found.as_record(),
            "would_help": [change.as_record() for change in changes],
        }
        emit({**record, **_sizes(session)})


def _tell_group(group: Prediction, placed: Placement, as_json: bool) -> None:
    """Print the memory of a worker in this group, and the placement of its workers."""
    cluster = group.setup.cluster
    if cluster.name:
        answer(f"{cluster.name}: {cluster.workers} {'worker' if cluster.workers == 1 else 'workers'}", as_json)
    _tell_memory(group.memory.plan, as_json)
    fit = "" if placed.fit_on_a_card is None else f", memory for {placed.fit_on_a_card}"
    answer(f"placement: {placed.workers_on_a_card} to a card{fit}; cluster.shard_base {placed.sharding}", as_json)


def _group_record(group: Prediction, placed: Placement) -> dict[str, Any]:
    cluster = group.setup.cluster
    return {
        **group.memory.plan.as_record(),
        "fits": group.memory.fits,
        "workers": cluster.workers,
        "agents": [member.name for member in group.setup.members],
        "stage_seconds": group.seconds,
        "placement": placed.as_record(),
    }


def _tell_memory(planned: MemoryPlan, as_json: bool) -> None:
    from teamtr.cli.progress import table
    from teamtr.ports import GB
    from teamtr.session.memory import crowded

    rows = [(item.what, f"{item.gb:.3g}", item.why) for item in planned.items]
    rows.append(("in all", f"{planned.total / GB:.3g}", ""))
    rows += [(item.what, f"{item.gb:.3g}", item.why) for item in planned.servers]
    if planned.available is not None:
        verdict = "fits" if planned.fits else "DOES NOT FIT"
        rows.append(("available", f"{planned.available / GB:.3g}", f"of the GPU's memory: {verdict}"))
    answer(table(("what", "GB", ""), rows), as_json)
    if planned.recomputed:
        names = ", ".join(planned.recomputed)
        answer(f"learner.recompute: a step computes the activations of {names} again on the way back", as_json)
    if (why := crowded(planned)) is not None:
        answer(f"refused by `teamtr train`: {why}", as_json)


def _tell_seconds(found: Prediction, as_json: bool) -> None:
    """Print a line for each phase that takes time, and the estimate for the whole run."""
    from teamtr.cli.progress import table
    from teamtr.cli.words import clock, percent
    from teamtr.planning.seconds import BOUNDS

    whole = found.seconds
    rows = [
        (name, f"{spent.seconds:.3g}", percent(spent.seconds / whole), spent.bound)
        for name, spent in found.phases.items()
        if spent.seconds > 0.0
    ]
    rows.append(("a stage", f"{whole:.3g}", "", f"{found.spent.bound}: {BOUNDS[found.spent.bound]}"))
    answer(table(("phase", "seconds", "share", "bound by"), rows), as_json)
    precisions = found.as_record()["precision"]
    waves = "" if found.waves == 1 else f", sampled in {found.waves} waves"
    answer(
        f"a run: {counted(found.setup.plan.stages, 'stage')} in about {clock(found.run_seconds)}, without grading and "
        f"its start; {found.tokens_per_s:,.0f} sampled tokens/s{waves}; messages at a time: {found.micro_batch}"
        f"{_recomputed(found.as_record()['recomputed'])}; precision " + ", ".join(sorted(set(precisions.values()))),
        as_json,
    )
    if found.setup.sampling.servers is not None:
        answer("seconds of sampling are those of the plain sampler: vLLM's are not predicted", as_json)
    if found.setup.plan.batches(len(found.setup.updated)) is None:
        answer("this plan decides as it goes how often it samples: one batch a stage is assumed", as_json)


def _recomputed(agents: Sequence[str]) -> str:
    return f", activations recomputed ({', '.join(agents)})" if agents else ""


def _tell_sizes(session: Session, as_json: bool) -> None:
    from teamtr.session.budget import budget_lines, parameter_lines

    answer("\n".join([*budget_lines(session), *parameter_lines(session)]), as_json)


def _sizes(session: Session) -> dict[str, Any]:
    from teamtr.session.budget import sizes_record

    return sizes_record(session)
