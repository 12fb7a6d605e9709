"""Teams small enough to solve: exact values, occupancies and KLs, for many teams of one shape at once.

Two kinds, both with messages that are token sequences, so that the token chain rule is real:

    DiscountedTeam   the paper's setting (sec:theory:setup): S states, one speaker per state, discount gamma.
    EpisodicTeam     what is trained: H turns, the state is the whole history, a return at the end. Routers may
                     depend on the history, episodes may stop early, agents may be blind to the current round.

Axis letters, besides those of ``types``:

    B  teams in a batch            S  states              A  messages that an agent can say
    K  prefixes of a message       V  vocabulary          T  token positions
    R  rows of an agent's policy   X  problems            H  turns of an episode
    N  histories at a turn, N = X * A**t: history h followed by message a is history h * A + a of the next turn

A policy is token logits per prefix; everything else follows. Logits are finite, so every message has mass.

A worked example::

    stage = random_discounted_stage(rng, size=100, agents=3, states=5, space=MessageSpace(2, 2))
    old, new = stage.teams[0], stage.teams[1]          # the first agent in stage.order was updated
    new.return_B - old.return_B                        # exact gains, one per team
    stage.steps[0].surrogate_B, stage.steps[0].kl_B    # L_1^seq and D_tok of eq:tr
"""

from teamtr.theory.tabular.discounted import DiscountedStage, DiscountedStep, DiscountedTeam
from teamtr.theory.tabular.draws import (
    Rewards,
    Router,
    Visibility,
    random_discounted_stage,
    random_discounted_team,
    random_episodic_stage,
    random_episodic_team,
)
from teamtr.theory.tabular.episodic import NOBODY, EpisodicStage, EpisodicStep, EpisodicTeam
from teamtr.theory.tabular.messages import Ints, MessageSpace, kl, log_softmax, tv
from teamtr.theory.tabular.updates import (
    LOGIT_BOUND,
    UPDATES,
    scale_to_radius,
    update_discounted,
    update_episodic,
)

__all__ = [
    "LOGIT_BOUND",
    "NOBODY",
    "UPDATES",
    "DiscountedStage",
    "DiscountedStep",
    "DiscountedTeam",
    "EpisodicStage",
    "EpisodicStep",
    "EpisodicTeam",
    "Ints",
    "MessageSpace",
    "Rewards",
    "Router",
    "Visibility",
    "kl",
    "log_softmax",
    "random_discounted_stage",
    "random_discounted_team",
    "random_episodic_stage",
    "random_episodic_team",
    "scale_to_radius",
    "tv",
    "update_discounted",
    "update_episodic",
]
