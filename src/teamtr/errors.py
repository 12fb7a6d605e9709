"""What can go wrong that a user can mend. Every message says what, where and what to do."""

from __future__ import annotations


class TeamTRError(Exception):
    """The run failed."""

    exit_code = 1


class UserError(TeamTRError, ValueError):
    """A team file, a model, a template or data that cannot be used as it is."""

    exit_code = 2


class Refused(TeamTRError):
    """Something that could be done but must not: it would harm a run, or prove nothing."""

    exit_code = 3


def first_line(error: BaseException) -> str:
    """What an error says, without the pages that some libraries add; its name where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
