"""The "How to reproduce" section: the command, the run's hardware and precision, and its team file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from teamtr.analysis.report.parts import Code, Part, Text
from teamtr.analysis.report.reading import Reading
from teamtr.analysis.report.section import Data, Section, register
from teamtr.analysis.report.words import num
from teamtr.version import __version__


def compute(run: Reading) -> Data:
    name = run.folder.name
    again = shlex.quote(f"{name}-again")
    commands = [
        "# beside the run folder",
        f"teamtr train {shlex.quote(f'{name}/team.yaml')} --out {again}",
        f"teamtr report {again}",
    ]
    return {"reproduce": {"version": __version__, "commands": commands, "team_file": run.team_text}}


def show(data: Data) -> list[Part]:
    again, run = data["reproduce"], data["run"]
    computed_with = (
        f"teamtr {again['version']}; threads {'unknown' if run['threads'] is None else run['threads']}; resumed "
        f"{run['resumed']} times; precision {_each(run['precisions'])}; sampling {_each(run['samplers'])}; "
        f"noise floors {_each(run['floors'])} nats; "
        f"seconds before the first stage: {_each(run['first_seconds'])}."
    )
    team_file = [Code(again["team_file"], folded="team.yaml")] if again["team_file"] else []
    return [Code("\n".join(again["commands"])), Text(computed_with), *team_file]


def _each(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {num(value)}" for name, value in values.items()) or "unknown"


register(
    Section(
        key="reproduce",
        title="How to reproduce",
        place=100,
        lead="The resolved team file and the command; on a CPU the same seed gives the same bits.",
        compute=compute,
        show=show,
    )
)
