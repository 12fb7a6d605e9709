"""The paged server of a policy, and the fallbacks for when it cannot sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from teamtr.engines.paged.jobs import Speaker
from teamtr.engines.paged.sampler import Server
from teamtr.engines.torch.attention import Unsupported


@dataclass(frozen=True)
class Paged:
    """A server, and the policy's speaker on it.

    Args:
        leave: use the plain sampler from now on, for this reason.
        otherwise: sample in the other precision from now on; raises UserError if there is none.
    """

    server: Server
    speaker: Speaker
    leave: Callable[[Unsupported], None]
    otherwise: Callable[[], None]
