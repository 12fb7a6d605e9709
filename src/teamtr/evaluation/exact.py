"""The exact success of a blind role division, from the agents' probabilities instead of samples.

In a blind round the messages are independent given the problem. With v_j the probability that agent j says "1" and s_j
that it says "0", exactly one agent volunteers with probability sum_j v_j prod_{k != j} s_k. A word with spaces around
it counts in grading and not here, so that the figure is slightly too low while agents still say such messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from teamtr.batches import AgentBatch
from teamtr.chat import render
from teamtr.ports import Codec, Engine
from teamtr.team import Team
from teamtr.types import Floats, Ids, Problem


def exactly_one(volunteers_A: Floats, abstains_A: Floats) -> float:
    """P(exactly one says "1" and all others "0"), for independent agents."""
    others_A = [np.prod(np.delete(abstains_A, j)) for j in range(len(abstains_A))]
    return float(np.dot(volunteers_A, others_A))


def role_success(
    team: Team,
    engine: Engine,
    codecs: Mapping[str, Codec],
    problems: Sequence[Problem],
    words: Mapping[str, Sequence[Ids]],
) -> float:
    """Mean exact success over the problems. ``words[agent]`` are the token ids of the message that volunteers and of
    the one that does not, end token included; if only the first is given, every other message does not volunteer."""
    distinct = {problem.prompt: problem for problem in problems}
    total = 0.0
    for prompt, problem in distinct.items():
        said = np.array([_word_probabilities(engine, codecs, team, a.name, problem, words) for a in team])
        share = sum(p.prompt == prompt for p in problems) / len(problems)
        total += share * exactly_one(said[:, 0], said[:, 1])
    return total


def _word_probabilities(
    engine: Engine,
    codecs: Mapping[str, Codec],
    team: Team,
    name: str,
    problem: Problem,
    words: Mapping[str, Sequence[Ids]],
) -> Floats:
    learner, prompt = engine.learner(name), team[name].system_prompt
    chat = render(agent=name, system_prompt=prompt, problem=problem, history=[], speakers=team.names)
    context = codecs[name].encode(chat)
    said = tuple(words[name])
    blank, no_logp = np.zeros(len(said), dtype=np.int64), np.zeros(0, np.float32)
    batch = AgentBatch(name, (context,) * len(said), said, (no_logp,) * len(said), blank, blank, blank)
    probabilities = np.exp(learner.begin(batch))
    learner.end()
    return np.append(probabilities, 1.0 - probabilities)[:2]
