"""``teamtr swap`` and ``teamtr compat``: replace an agent's model, and compare models' token ids."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from teamtr.cli.common import JsonFlag, answer, app, emit, errors, fail
from teamtr.cli.complete import agents_of_run
from teamtr.text import share

HELD_OUT, MAX_STEPS, DOUBLINGS, CHECK_EVERY = 0.2, 2000, 5, 25
"""The defaults of the alignment."""

Run = Annotated[Path, typer.Argument(help="A run folder.")]


@app.command()
def swap(
    run: Run,
    agent: Annotated[str, typer.Option(help="The agent to replace.", autocompletion=agents_of_run)],
    model: Annotated[str, typer.Option("--with", help="The new model: a folder, a hub id or tiny.")],
    revision: Annotated[str | None, typer.Option(help="For a hub id: the branch, tag or commit to load.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the new run. [default: `RUN-swap-AGENT`]")] = None,
    no_align: Annotated[bool, typer.Option("--no-align", help="Install the model without alignment.")] = False,
    reset: Annotated[
        bool, typer.Option("--reset", help="Install the model and retrain the whole team from scratch.")
    ] = False,
    train: Annotated[str | None, typer.Option(help="full or lora. [default: full for tiny, lora for others]")] = None,
    probes: Annotated[int, typer.Option(min=2, help="Messages of the old agent to align on.")] = 500,
    held_out: Annotated[float, typer.Option(help="Share of their problems that is held out.")] = HELD_OUT,
    learning_rate: Annotated[
        float | None, typer.Option(help="Learning rate of the alignment. [default: several are tried]")
    ] = None,
    max_steps: Annotated[int, typer.Option(min=1, help="Most steps of the alignment.")] = MAX_STEPS,
    doublings: Annotated[int, typer.Option(min=0, help="How often the number of probes may double.")] = DOUBLINGS,
    check_every: Annotated[int, typer.Option(min=1, help="Steps between checks on the held-out probes.")] = CHECK_EVERY,
    think: Annotated[
        str | None, typer.Option(help="Thinking, from the swap on: keep, strip or forbid; see docs/swap.md.")
    ] = None,
    tools: Annotated[str | None, typer.Option(help="Tool calls, from the swap on: off or canonical.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt, from the swap on: explicit or template.")] = None,
    stages: Annotated[
        int | None,
        typer.Option(min=1, help="Stages of the new run. [default: remaining stages, or the full plan if finished]"),
    ] = None,
    eval_problems: Annotated[int | None, typer.Option(min=1, help="As in `teamtr eval`.")] = None,
    eval_samples: Annotated[int | None, typer.Option(min=1, help="As in `teamtr eval`.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Replace one agent of a trained team with another model, align it briefly, and write a run to continue from.

    The new model learns from the old agent's messages in the team's own conversations, until the exact KL from old to
    new is within the radius on held-out probes. The old run is not changed. The swap itself is not certified (no bound
    guarantees that the team is as good as before); updates after it are. The same command resumes an interrupted swap.
    Continue with `teamtr train OUT`.
    """
    if no_align and reset:
        fail("use either --no-align or --reset: a team that is retrained from scratch has nothing to align to", 2)
    if no_align or reset:
        of_alignment = {
            "--held-out": held_out != HELD_OUT,
            "--learning-rate": learning_rate is not None,
            "--max-steps": max_steps != MAX_STEPS,
            "--doublings": doublings != DOUBLINGS,
            "--check-every": check_every != CHECK_EVERY,
        }
        for flag in (flag for flag, given in of_alignment.items() if given):
            fail(f"{flag} is for the alignment, and {'--reset' if reset else '--no-align'} makes none: leave it out", 2)
    for flag, value, values in (
        ("--train", train, ("full", "lora")),
        ("--think", think, ("keep", "strip", "forbid")),
        ("--tools", tools, ("off", "canonical")),
        ("--system", system, ("explicit", "template")),
    ):
        if value is not None and value not in values:
            fail(f"{flag} is {' or '.join(values)}, not {value!r}", 2)
    folder = out or _beside(run, f"-swap-{agent}")
    last: dict[str, Any] = {}
    with errors():
        from teamtr.cli.terminal import say
        from teamtr.swap import Request
        from teamtr.swap import swap as swap_agent

        request = Request(
            agent=agent,
            model=model,
            revision=revision,
            mode="reset" if reset else "direct" if no_align else "aligned",
            train=train,  # type: ignore[arg-type]
            probes=probes,
            held_out=held_out,
            learning_rate=learning_rate,
            check_every=check_every,
            max_steps=max_steps,
            doublings=doublings,
            stages=stages,
            eval_problems=eval_problems,
            eval_samples=eval_samples,
            think=think,  # type: ignore[arg-type]
            tools=tools,  # type: ignore[arg-type]
            system=system,  # type: ignore[arg-type]
        )
        for record in swap_agent(run, request, folder):
            for line in _lines(record):
                say(line)
            last = record
    where = shlex.quote(str(folder))
    say(f"\nrun folder: {folder}; next: teamtr train {where}")
    if as_json:
        alignment = last["alignment"] and {k: v for k, v in last["alignment"].items() if k not in ("curve", "trials")}
        emit({"folder": str(folder), **last, "alignment": alignment})


def _beside(run: Path, ending: str) -> Path:
    """A folder next to the run, with its name and this ending; `.` and `..` are resolved, as they are not names."""
    named = run if run.name not in ("", "..") else run.resolve()
    return named.parent / f"{named.name}{ending}"


def _lines(record: dict[str, Any]) -> list[str]:
    """Format a record of the swap as lines."""
    match record["kind"]:
        case "protocol":
            marks = [f"  {'✓' if i['ok'] else '✗'} {i['point']}: {i['note'] or 'the same'}" for i in record["items"]]
            return ["protocol", *marks]
        case "swap_eval":
            when = {"before": "before", "at_swap": "at the swap", "after": "after alignment"}[record["when"]]
            return [f"{when}: held-out success {share(record['avg_at_k'], record['avg_interval'])}"]
        case "align":
            of_what = "cross-entropy" if record["radius"] is None else f"KL, radius {record['radius']:g}"
            found = f"{record['kl']:.4f} (upper {record['upper']:.4f}, on training probes {record['train_kl']:.4f})"
            return [f"  rate {record['learning_rate']:<8.3g} step {record['step']:>5}  {found}  {of_what}"]
        case "swap":
            return _summary(record)
    return []


def _summary(record: dict[str, Any]) -> list[str]:
    alignment = record["alignment"] or {}
    lines = [
        f"{record['agent']}: {record['from']['model']} -> {record['to']['model']}, {record['mode']}; "
        f"shock {100 * record['shock']:.1f} points (unaligned: {100 * record['direct_shock']:.1f}); not certified"
    ]
    if alignment.get("within_radius") is not None:
        lines.append(_against_radius("held-out probes", alignment, alignment["radius"]))
    if "unseen" in alignment:
        lines.append(_against_radius("unseen test problems", alignment["unseen"], alignment["radius"]))
    if alignment.get("within_radius") is False:
        lines.append(
            f"warning: the radius was not reached ({alignment['train_kl']:.4f} on the training probes); try more "
            "--probes, more --max-steps or another --learning-rate"
        )
    elif "unseen" in alignment and not _is_within(alignment["unseen"], alignment["radius"]):
        lines.append("warning: aligned on the probes' problems only; more --probes cover more problems")
    if "note" in alignment:
        lines.append(f"warning: {alignment['note']}")
    return lines


def _against_radius(where: str, found: dict[str, Any], radius: float) -> str:
    """The KL next to the radius; the upper bound decides."""
    verdict = "within" if _is_within(found, radius) else "outside"
    return f"on {where}: KL {found['kl']:.4f} (upper {found['kl_upper']:.4f}), {verdict} the radius {radius:g}"


def _is_within(found: dict[str, Any], radius: float) -> bool:
    return bool(found["kl_upper"] <= radius)


@app.command()
def compat(
    a: Annotated[str, typer.Argument(help="A model: a folder, a hub id or tiny.")],
    b: Annotated[str, typer.Argument(help="The other model.")],
    strings: Annotated[
        Path | None, typer.Option(help="A text file; the tokenizers are compared on every line.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="A run folder; the tokenizers are compared on its contexts.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Most strings taken from --strings and --run.")] = 1000,
    as_json: JsonFlag = False,
) -> None:
    """Compare the token ids of two models, on a team's own contexts and on 1,000 difficult strings.

    Of the team's own contexts, up to --count are taken, evenly spaced. The difficult strings (blanks, scripts, digits,
    markup, tool calls) are always all used.

    Exit code 0: the ids are identical, so the exact KL between the two models is defined; 3: they differ, and the first
    differences are printed.
    """
    from teamtr.chat.tokenizers import compare_tokenizers
    from teamtr.session.models import load_tokenizer
    from teamtr.swap import compared_strings, run_strings

    with errors():
        own = _lines_of(strings) if strings else []
        own += run_strings(run) if run else []
        found = compare_tokenizers(load_tokenizer(a), load_tokenizer(b), compared_strings(own, count))
    shown = (
        f"  {difference.string[:60]!r} from token {difference.position}: {difference.ids_a} and {difference.ids_b}"
        for difference in found.differences[:5]
    )
    answer("\n".join([str(found), *shown]), as_json)
    if as_json:
        emit({"a": a, "b": b, **found.as_record()})
    if not found.identical:
        raise typer.Exit(3)


def _lines_of(file: Path) -> list[str]:
    from teamtr.errors import UserError

    try:
        return [line for line in file.read_text(encoding="utf-8").split("\n") if line]
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "not UTF-8")
        raise UserError(f"--strings {file} cannot be read ({why}): give a text file in UTF-8") from error
