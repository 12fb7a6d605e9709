"""Errors that a user can fix. Every message says what is wrong, where, and what to do."""

from __future__ import annotations


class TeamTRError(Exception):
    """The run failed."""

    exit_code = 1


class UserError(TeamTRError, ValueError):
    """A team file, model, template or data that is invalid or cannot be used."""

    exit_code = 2


class Refused(TeamTRError):
    """A possible action that is refused because it would harm a run or prove nothing."""

    exit_code = 3


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without the pages that some libraries add; its type if it is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
