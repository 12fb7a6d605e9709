"""Where a policy is sampled from pages, and what to do when it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from teamtr.engines.paged.jobs import Speaker
from teamtr.engines.paged.sampler import Server
from teamtr.engines.torch.attention import Unsupported


@dataclass(frozen=True)
class Paged:
    """The server that samples it, and how it speaks there.

    Args:
        leave: sample plainly from now on, for this reason.
        otherwise: sample in the other precision from now on; raises UserError where there is none.
    """

    server: Server
    speaker: Speaker
    leave: Callable[[Unsupported], None]
    otherwise: Callable[[], None]
