"""Replies that try to earn an undeserved reward, and honest replies that graders used to reject.

``attacks()`` deserve no reward, ``HONEST`` deserve the full one. Where a grader judges otherwise, ``why`` gives the
reason for leaving it so. ``golden/test_attacks.py`` checks every row, and that docs/graders.md states the results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Attack:
    """A reply and its deserved reward. If the grader gives another, ``earned`` is that, and ``why`` the reason."""

    grader: str
    gold: str
    reply: str
    deserved: float
    why: str = ""
    earned: float | None = None

    @property
    def expected(self) -> float:
        return self.deserved if self.earned is None else self.earned


BOXED = r"""
42 ~ 41=42
42 ~ x=41=42
42 ~ 41 \approx 42
42 ~ 6\cdot 8 = 42
42 ~ 41, x = 42
42 ~ 41 \text{ or } 42
42 ~ 42 \text{ or } 41
42 ~ 42\text{ or 41}
42 ~ 42\text{ or forty-one}
42 ~ 42\text{ and not 41}
42 ~ 42 or 41
42 ~ 41,42
42 ~ \{41,42\}
42 ~ [41,42]
42 ~ 42 \pm 1
42 ~ 41 < 42 < 43
42 ~ 41 \le x \le 42
42 ~ 42\%
42 ~ 4200\%
42 ~ 42!
42 ~ 42_{10}
42 ~ 6\cdot 7
42 ~ \frac{84}{2}
42 ~ \max(41,42)
42 ~ 42x
42 ~ 42\pi
42 ~ not 42
42 ~ \text{the answer}
42 ~ x
42 ~ 042.5
42 ~ 42 41
42 ~ 42/1
42 ~ 4 2
42 ~ \lim 42
42 ~ \boxed{41}
42 ~ 42e0e0
42 ~ nan
42 ~ \infty
\frac{1}{2} ~ 123456789012e5
\frac{1}{2} ~ \frac{2}{4}
\frac{1}{2} ~ 0.5, 0.6
\frac{1}{2} ~ 0.49999999999
\frac{1}{2} ~ 50
\frac{1}{3} ~ 0.333
\pi(R^2-r^2) ~ 0
\pi(R^2-r^2) ~ \pi(r^2-r^2)
\tan 15^\circ ~ \tan 15
\sqrt{2} ~ \sqrt[3]{2}
\sqrt{2} ~ \sqrt{2}\text{ or 2}
x^2 ~ |x|x
x^2 ~ \sqrt{x^4}\cdot\frac{x}{x}+0^x
x+y ~ x+y+z-z^2
3,-3 ~ 3
3,-3 ~ 3,-3,4
(1,2) ~ (2,1)
(1,2) ~ [1,2]
(1,2) ~ 1,2
\{1,2\} ~ \{1,2,2\}
C ~ B = C
C ~ A, B, C, D
\text{east} ~ \text{west or east}
\text{east} ~ \text{east west}
10^{50} ~ 10^{50}+1
""".strip()


def _math() -> Iterator[Attack]:
    for line in BOXED.splitlines():
        gold, answer = line.split(" ~ ")
        reply = rf"\boxed{{{answer}}}"
        yield Attack("default", gold, reply, 0.0, *STILL.get(("default", answer), ()))
        yield Attack("deepscaler", gold, reply, 0.0, *STILL.get(("deepscaler", answer), ()))
    for grader, gold, reply in [
        ("default", "42", r"\boxed{42} no, \boxed{41}"),
        ("default", "42", r"<think>\boxed{42}</think> I cannot tell."),
        ("default", "42", "It may be 42, or 41, who knows which of them it is"),
        ("default", "42", "Answer: 42\nAnswer: 41"),
        ("default", "42", r"\boxed{" + "42" * 2000 + "}"),
        ("default", "42", "x = 41 x = 42"),
        ("default", "42", r"\boxed{2x=42}"),
        ("default", r"\text{east}", r"\boxed{\text{west}=\text{east}}"),
        ("last_number", "42", "One of 42, 41"),
        ("last_number", "42", "42%"),
        ("last_number", "42", "It is CO42"),
        ("last_number", "42", "I count every number: 40, 41, 42"),
        ("dapo", "42", "Answer: 42 or 41"),
        ("dapo", "42", "Answer: 42\nAnswer: 41"),
        ("dapo", "42", "Answer: 42" + "." * 400),
        ("dapo", "42", "Answer: 42,41"),
        ("dapo", "42", "Answer: 41=42"),
        ("dapo", "42", "Answer: 42 units squared"),
        ("gsm8k", "42", "#### 41\n#### 42"),
        ("gsm8k", "42", "<think>#### 42</think>#### 41"),
        ("gsm8k", "42", "#### 42.5"),
        ("gsm8k", "42", "#### 42%"),
        ("gsm8k", "42", "#### 42 or 41"),
        ("official", "42", "#### 41 #### 42"),
        ("official", "42", "<think>#### 42</think>#### 41"),
        ("official", "42", "#### 42 or 41"),
    ]:
        yield Attack(grader, gold, reply, 0.0, *STILL.get((grader, reply), ()))


def _data() -> Iterator[Attack]:
    for grader, gold, reply in [
        ("data exact", "east", "<think>east</think>west"),
        ("data exact", "east", "east west"),
        ("data exact", "east", "e a s t"),
        ("data exact", "east", "east."),
        ("data exact", "east", "ea\u200bst"),
        ("data number", "42", "<think>It is 42.</think>I do not know."),
        ("data number", "42", "42 or 41"),
        ("data number", "50", "50%"),
        ("data number", "50%", "50"),
        ("data number", "42%", "42"),
        ("data number", "42", "42e1"),
        ("data number", "42", "42/2"),
        ("data number", "42", "1e999999999"),
        ("data number", "42", "x42"),
        ("data number", "42", "40, 41, 42"),
        ("data regex", "42", "<think>\n#### 42\n</think>\nnone"),
        ("data regex", "42", "#### 42\n#### 41"),
        ("data regex", "42", "#### 42 or 41"),
        ("data regex", "42", "####42"),
    ]:
        yield Attack(grader, gold, reply, 0.0, *STILL.get((grader, reply), ()))


HOUSES = {"House 1": {"Name": "ann"}, "House 2": {"Name": "bob"}}
WRONG_HOUSES = {"House 1": {"Name": "bob"}, "House 2": {"Name": "ann"}}


def _zebra() -> Iterator[Attack]:
    right, wrong = json.dumps(HOUSES), json.dumps(WRONG_HOUSES)
    both = '{"House 1": {"Name": "bob", "Name": "ann"}, "House 2": {"Name": "ann", "Name": "bob"}}'
    for reply in [
        f'{{"solution": {wrong}, "solution": {right}}}',
        f'{{"solution": {both}}}',
        f'{{"solution": {right}}} no: {{"solution": {wrong}}}',
        f'<think>{{"solution": {right}}}</think>{{"solution": {wrong}}}',
        f'{{"solution": [{right}]}}',
        f'{{"solution": {right}',
        f'{{"answer": {right}}}',
        '{"solution": {"House 1": {"Name": ["bob", "ann"]}, "House 2": {"Name": ["ann", "bob"]}}}',
        '{"solution": {"House 1": {"Name": ["ann", "bob"]}, "House 2": {"Name": ["bob", "ann"]}}}',
        '{"solution": {"House 1": {"Name": "ann bob"}, "House 2": {"Name": "ann bob"}}}',
        '{"solution": {"House 1": {"Name": true}, "House 2": {"Name": null}}}',
        '{"solution": {"House 1": {"Name": "*"}, "House 2": {"Name": "*"}}}',
    ]:
        yield Attack("zebralogic", "ann, bob", reply, 0.0, *STILL.get(("zebralogic", reply), ()))


TOWER = "unstack the red block from on top of the blue block\nput down the red block"
PLAN_SAID = "1. **Unstack red from blue**\n2. **Put down red**"


def _plans() -> Iterator[Attack]:
    for reply in [
        "",
        "The goal is reached.",
        "put down the red block",
        "unstack the red block from on top of the blue block",
        f"<think>{TOWER}</think>No plan.",
        f"{TOWER}\npick up the blue block\nstack the blue block on top of the red block\npick up the red block",
        f"{PLAN_SAID}\n\nPlan:\n1. Put down red",
        f"{PLAN_SAID}\n\nPlan:\n1. Put down red from blue",
        f"{PLAN_SAID}\n\nNo, rather:\n- Pick up blue\n- Stack blue on red",
        f"{PLAN_SAID}\n3. **Pick up red and blue**",
        "1. **Put down red**\n2. **Unstack red from blue**",
        "1. **Unstack red from green**\n2. **Put down red**",
        "(ontable a)",
        "(put-down a)\n(unstack a b)",
        "[PLAN]\nmake the goal true\n[PLAN END]",
        f"[PLAN]\nput down the red block\n[PLAN END]\n{TOWER}",
        "unstack and put down every block until the goal is reached",
        f"{TOWER}\nunstack the red block from the table",
    ]:
        yield Attack("planbench", "red on the table", reply, 0.0, *STILL.get(("planbench", reply), ()))


STORY = "The man on the roof had painted the wrong house and was hiding from the owner until dark"
SOUP = "".join(sorted(STORY))
OTHER_STORY = "She threw the letter into the harbor since nobody had ever wanted the old ship to return home"


def _games() -> Iterator[Attack]:
    for grader, gold, reply in [
        ("arbench:gn", "0123", "0124 0123 0125"),
        ("arbench:gn", "0123", "0 1 2 3"),
        ("arbench:gn", "0123", "90123"),
        ("arbench:gn", "0123", "<think>0123</think>0124"),
        ("arbench:gn", "0123", "all of 0000 to 9999"),
        ("arbench:dc", "B", "Answer: A B C D E"),
        ("arbench:dc", "B", "Answer: A\nAnswer: B"),
        ("arbench:dc", "B", "<think>Answer: B</think>Answer: A"),
        ("arbench:dc", "B", "Answer: b"),
        ("arbench:dc", "E", "Answer: A or B or C or D or E"),
        ("arbench:sp", STORY, SOUP),
        ("arbench:sp", STORY, " ".join(sorted(STORY.split()))),
        ("arbench:sp", STORY, OTHER_STORY),
        ("arbench:sp", STORY, f"<think>{STORY}</think>It was a dream."),
        ("arbench:sp words", STORY, SOUP),
        ("arbench:sp words", STORY, " ".join(sorted(STORY.split()))),
        ("arbench:sp words", STORY, OTHER_STORY),
        ("arbench:sp words", STORY, f"<think>{STORY}</think>It was a dream."),
        ("arbench:sp words", STORY, "the " * 20),
        ("arbench:sp words", STORY, f"{STORY} " * 20),
    ]:
        yield Attack(grader, gold, reply, 0.0, *STILL.get((grader, reply), ()))


_MIRROR = "the verifier that is mirrored reads it so"
_NAMED = "what stands before `=` counts as the name of the answer"
_RULE = "the last number counts: that is the grader"
_OFFICIAL = "the official pattern stops after the number"
_BAGS = "the benchmark's score is a bag of characters; use `score: words`"
_SHARED = "some words stand in the same order"

STILL: dict[tuple[str, str], tuple[str, float]] = {
    ("default", "x = 41 x = 42"): (_NAMED, 1.0),
    ("default", r"\boxed{2x=42}"): (_NAMED, 1.0),
    ("default", r"\boxed{\text{west}=\text{east}}"): (_NAMED, 1.0),
    **{
        ("deepscaler", answer): (_MIRROR, 1.0)
        for answer in (
            *(r"41=42", r"42 \text{ or } 41", r"42\text{ or 41}", r"42\text{ or forty-one}", r"42\text{ and not 41}"),
            *(r"42\%", "4 2", r"\pi(r^2-r^2)", r"\tan 15", r"\sqrt[3]{2}", r"\sqrt{2}\text{ or 2}", "B = C"),
        )
    },
    ("last_number", "I count every number: 40, 41, 42"): (_RULE, 1.0),
    ("dapo", "Answer: 41=42"): (_MIRROR, 1.0),
    ("gsm8k", "#### 42%"): (_OFFICIAL, 1.0),
    ("gsm8k", "#### 42 or 41"): (_OFFICIAL, 1.0),
    ("official", "<think>#### 42</think>#### 41"): ("the official rule knows no thinking", 1.0),
    ("official", "#### 42 or 41"): (_OFFICIAL, 1.0),
    ("data number", "40, 41, 42"): (_RULE, 1.0),
    (
        "zebralogic",
        '{"solution": {"House 1": {"Name": ["ann", "bob"]}, "House 2": {"Name": ["bob", "ann"]}}}',
    ): ("of a list the benchmark takes the first item: one guess, no choice", 1.0),
    ("planbench", f"{TOWER}\nunstack the red block from the table"): (
        "the benchmark passes over lines with another number of objects",
        1.0,
    ),
    ("arbench:dc", "Answer: A or B or C or D or E"): (
        "the benchmark takes the last letter: a guess that is right for E alone",
        1.0,
    ),
    ("arbench:sp", SOUP): (_BAGS, 1.0),
    ("arbench:sp", " ".join(sorted(STORY.split()))): (_BAGS, 1.0),
    ("arbench:sp", OTHER_STORY): (_BAGS, 0.79),
    ("arbench:sp", f"<think>{STORY}</think>It was a dream."): (_BAGS, 0.25),
    ("arbench:sp words", " ".join(sorted(STORY.split()))): (_SHARED, 0.3),
    ("arbench:sp words", f"{STORY} " * 20): ("it is told, though twenty times", 0.1),
}
"""(grader, answer or reply) -> the reason, and the reward that it earns."""

HONEST = tuple(
    Attack(grader, gold, reply, 1.0)
    for grader, gold, reply in [
        ("default", "42", r"\boxed{x = 42}"),
        ("default", "42", r"\boxed{m+n = 42}"),
        ("default", "42", r"\boxed{\frac{84}{2} = 42}"),
        ("default", "42", r"\boxed{41.8 \approx 42}"),
        ("default", "42", r"\boxed{42\text{ cm}^2}"),
        ("default", "42", "\\boxed{４２}"),
        ("default", "300000000", r"\boxed{3\times10^8}"),
        ("default", "3,-3", r"\boxed{\pm 3}"),
        ("default", r"\arctan 2", r"\boxed{\tan^{-1} 2}"),
        ("default", r"\tan 15^\circ", r"\boxed{2-\sqrt{3}}"),
        ("default", r"\pi(R^2-r^2)", r"\boxed{\pi(R+r)(R-r)}"),
        ("default", "3r^2", r"\boxed{3R^2}"),
        ("default", r"50\%", r"\boxed{50}"),
        ("default", "0.5", r"\boxed{50\%}"),
        ("default", "42", "<think>Perhaps 41?</think>Answer: 42"),
        ("last_number", "42", "I count 42 of them in all, as far as I can see"),
        ("deepscaler", "42", r"\boxed{42}"),
        ("dapo", "42", "Answer: $42$"),
        ("gsm8k", "42", "#### 42"),
        ("official", "42", "#### 42"),
        ("data exact", "east", "<think>west?</think> East "),
        ("data number", "42", "<think>41?</think>That makes 42."),
        ("data number", "0.5", "50%"),
        ("data number", "42", "４２"),
        ("data regex", "42", "#### 42"),
        ("zebralogic", "ann, bob", json.dumps({"solution": HOUSES})),
        ("planbench", "red on the table", TOWER),
        ("planbench", "red on the table", PLAN_SAID),
        ("planbench", "red on the table", f"{PLAN_SAID}\n\nPlan:\n1. Unstack(red, blue)\n2. PutDown(red)"),
        ("arbench:gn", "0123", "Guess: 0123"),
        ("arbench:dc", "B", "Answer: B"),
        ("arbench:sp", STORY, STORY),
        ("arbench:sp words", STORY, f"{STORY}."),
    ]
)


def attacks() -> tuple[Attack, ...]:
    return (*_math(), *_data(), *_zebra(), *_plans(), *_games())
