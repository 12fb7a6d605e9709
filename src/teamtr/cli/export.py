"""``teamtr export``: writes agents of a run to folders, for loading, serving and sharing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from teamtr.cli.common import CheckpointOption, JsonFlag, app, checkpoint_of, emit, errors
from teamtr.cli.complete import agents_of_run


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[Path, typer.Argument(help="The folder to create.")],
    agent: Annotated[
        str | None,
        typer.Option(
            help="Export this agent into OUT. [default: all agents, each into OUT/AGENT]", autocompletion=agents_of_run
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Adapters as PEFT folders; a whole model is refused.")
    ] = False,
    merged: Annotated[
        bool, typer.Option("--merged", help="Whole models: adapters are merged into their bases.")
    ] = False,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Whole models in bf16, as llama.cpp's convert_hf_to_gguf.py takes them.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="USER/NAME",
            help="Upload to the Hugging Face hub besides: the agent to USER/NAME; all agents each to USER/NAME-AGENT.",
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: where everybody sees it.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Export agents of a run as folders that transformers, PEFT or vLLM can load, each with a model card.

    Without --adapter, --merged or --gguf, each agent is exported in the form in which it was trained.
    """
    with errors():
        from teamtr.cli.terminal import say
        from teamtr.errors import UserError
        from teamtr.session.export import Form
        from teamtr.session.export import export as export_agents
        from teamtr.session.exported import vllm_lines
        from teamtr.session.hub import push as push_folder
        from teamtr.session.hub import require_pushable

        asked = {"adapter": adapter, "merged": merged, "gguf": gguf}
        given = [name for name, is_given in asked.items() if is_given]
        if len(given) > 1:
            raise UserError(f"--{given[0]} and --{given[1]} are two forms: choose one")
        if public and push is None:
            raise UserError("--public is for --push USER/NAME, which is not given")
        form = cast(Form, given[0] if given else "trained")
        written = export_agents(run, out, agent=agent, form=form, checkpoint=checkpoint_of(checkpoint))
        for each in written:
            say(f"{each.agent}: {each.form} in {each.folder}{f', on {each.base}' if each.base else ''}")
        lines = list(vllm_lines(written))
        for line in lines:
            say(f"serve: {line}")
        pushed = {}
        if push is not None:
            for each in written:
                require_pushable(each.agent, each.folder)
            for each in written:
                repo = push if agent is not None else f"{push}-{each.agent}"
                pushed[each.agent] = push_folder(each.agent, each.folder, repo, private=not public)
                say(f"{each.agent}: pushed to {pushed[each.agent]}")
    if as_json:
        emit(
            {
                "agents": [
                    {
                        "agent": e.agent,
                        "folder": str(e.folder),
                        "form": e.form,
                        "base": e.base,
                        "precision": e.precision,
                    }
                    for e in written
                ],
                "serve": lines,
                "pushed": pushed,
            }
        )
