"""Answers to problems of mathematics: what a reply states, and what counts as the same."""

from __future__ import annotations

import pytest

from teamtr.grading.math.dapo import dapo_answer, dapo_normalise
from teamtr.grading.math.latex import latex_to_text
from teamtr.grading.math.rules import RULES, deepscaler_answer
from teamtr.grading.math.same import graders, same_answer
from teamtr.grading.math.statement import last_boxed, stated_answer
from teamtr.grading.math.text import quick_same

# What a reply states


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{4}. I was told to use \boxed{}.", "4"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\fbox{7}", "7"),
        (r"\boxed{5} and then \boxed{6", "5"),
        (r"\boxed{6", None),
        (r"\boxed{}", None),
        ("**Answer:** $x=5$.", "x=5"),
        ("The final answer is 42. That is because 6 * 7 = 42.", "42"),
        ("Answer:\n\n42\n", "42"),
        ("Answer: \\[\n5\n\\]", "5"),
        ("answer: 5 answer: 6", "6"),
        ("Answer: $18", "$18"),
        ("所以答案是：$42$。", "42"),
        ("#### Step 1. Add\n#### 18", "18"),
        ("#### 18\nAnswer: 19", "19"),
        ("Answer: 19\n#### 18", "18"),
        ("204", "204"),
        (r"\frac{3}{4}", r"\frac{3}{4}"),
        ("I think that it is 204", None),
        ("", None),
        ("first line\nsecond line", None),
    ],
)
def test_what_a_reply_states(reply: str, said: str | None) -> None:
    assert stated_answer(reply) == said
    # Thoughts make no difference to what is stated after them, nor do the tags by themselves.
    assert stated_answer(f"<think>Perhaps \\boxed{{99}}?</think>{reply}") == (said if reply else "99")
    assert stated_answer(f"some thoughts</think>\n{reply}") == said


def test_thinking_counts_only_where_nothing_follows_it() -> None:
    assert stated_answer(r"<think>\boxed{1}</think> So \boxed{2}.") == "2"
    assert stated_answer(r"<think>\boxed{1}</think> Answer: 2") == "2"
    assert stated_answer(r"<think>\boxed{1}</think> That is all I can say about it.") is None
    assert stated_answer("<think>\\boxed{1}</think>\n ") == "1"
    assert stated_answer(r"<think>it must be \boxed{1}") == "1"


def test_the_last_number_is_taken_only_when_asked_for() -> None:
    reply = "There are three of them, so that we have 12 in all, I should say"
    assert stated_answer(reply) is None
    assert stated_answer(reply, last_number=True) == "12"
    assert RULES["last_number"].judge(reply, "12").right is True
    assert RULES["default"].judge(reply, "12").extracted is None


def test_too_long_for_an_answer() -> None:
    assert last_boxed("\\boxed{" + "1" * 5000 + "}") is None
    assert stated_answer("1" * 5000) is None


def test_the_mirror_reads_as_its_verifier_does() -> None:
    assert deepscaler_answer(r"\boxed{1} \boxed{2}") == "2"
    assert deepscaler_answer(r"<think>\boxed{1}</think>\boxed{2}") == "2"
    assert deepscaler_answer(r"<think>\boxed{1}</think> none") is None
    assert deepscaler_answer(r"\boxed{1} \boxed{2") is None, "the last one, though it does not close"
    assert deepscaler_answer("Answer: 3") is None


def test_dapo_reads_the_end_only() -> None:
    assert dapo_answer("Answer: 1\nanswer : $2$.") == "$2$."
    assert dapo_answer("Answer: 1" + " " * 300) is None
    for said in ("34", "$34$", r"\boxed{34}", "x = 34", "34 dollars", r"34^\circ", r"34\text{ units}"):
        assert dapo_normalise(said) == "34"
    assert dapo_normalise("1,234") == "1234"
    assert dapo_normalise(r"\frac12") == r"\frac{1}{2}"


def test_latex_as_the_verifier_reads_it() -> None:
    for source, text in [
        (r"1 \frac{3}{4}", "1 3/4"),
        (r"\frac 34", "3/4"),
        (r"\sqrt[3]{2}+\sqrt5", "√(2)+√(5)"),
        (r"\begin{pmatrix} 1 & -2 \\ 30 & 4 \end{pmatrix}", "[  1 -2; 30  4 ]"),
        (r"\left( -\infty, \cot x \right]", "( -∞, x ]"),
        (r"\text{odd} \mbox{dropped}\mathbb{R}", "odd ℝ"),
        (r"10\,000 \& 5\%", "10 000 & 5%"),
    ]:
        assert latex_to_text(source) == text
    with pytest.raises(ValueError, match="deep"):
        latex_to_text("{" * 200)


# The same answer


def pairs(table: str) -> list[tuple[str, str]]:
    """(answer, truth) from lines with a tilde between them."""
    return [(given, truth) for line in table.strip().splitlines() for given, truth in [line.strip().split(" ~ ")]]


SAME = pairs(
    r"""
    \sqrt{12} ~ 2\sqrt{3}
    100(4-\pi) ~ 400-100\pi
    \frac{\sqrt{2}}{2} ~ \frac{1}{\sqrt{2}}
    -2,1 ~ 1,-2
    \{1,-2\} ~ 1,-2
    \{4,5,7\} ~ \{7, 5, 4\}
    n = 2, 5, 13 ~ 2,5,13
    1+\sqrt{19}, 1-\sqrt{19} ~ 1 \pm \sqrt{19}
    x=2, x=3 ~ 2, 3
    60^\circ, 120^\circ ~ 120, 60
    (3, \pi/2) ~ \left( 3, \frac{\pi}{2} \right)
    [-2,7] ~ x \in [-2,7]
    (x,y)=(1,2) ~ (1,2)
    -2 \le x \le 7 ~ x \in [-2,7]
    (-\infty, 0] ~ x \le 0
    5 \ge x ~ x \le 5
    x<-2 \text{ or } x>3 ~ (-\infty,-2)\cup(3,\infty)
    (3,\infty)\cup(-\infty,-2) ~ (-\infty,-2)\cup(3,\infty)
    2x-y+3=0 ~ y = 2x + 3
    y=2x+3 ~ 2x+3
    f(x)=x^2 ~ x^2
    x=\frac{3}{2} ~ \frac32
    \begin{pmatrix} -2 \\ 1/3 \end{pmatrix} ~ \begin{bmatrix}-2\\\frac13\end{bmatrix}
    40_{9} ~ 40_9
    (40)_9 ~ 40_9
    9i+6 ~ 6+9i
    3R^2 ~ 3r^2
    \frac{-1-5i}{13} ~ -\frac{1}{13}-\frac{5}{13}i
    2^{4181} ~ 4^{2090}\cdot 2
    1+2004! ~ 2004!+1
    e^{-1} ~ \frac{1}{e}
    \ln 4 ~ 2\ln 2
    \cos x/\sin x ~ \cot x
    2\sin x\cos x ~ \sin 2x
    \log_2 8 + x ~ 3+x
    2^{1/3} ~ \sqrt[3]{2}
    \frac{x^9-1}{x-1} ~ x^8+x^7+x^6+x^5+x^4+x^3+x^2+x+1
    (b+2)(a+5) ~ (a+5)(b+2)
    \frac{n(n-1)}{2} ~ \binom n2
    sqrt(2)/2 ~ \frac{\sqrt{2}}{2}
    x**2+1 ~ x^2+1
    pi/6 ~ \frac{\pi}{6}
    2*sqrt(5) ~ 2\sqrt{5}
    27.0 ~ 27
    073 ~ 73
    $42$ ~ 42
    336^\circ ~ 336
    m+n=204 ~ 204
    +5 ~ 5
    -0 ~ 0
    11,\! 111,\! 111,\! 100 ~ 11111111100
    10{,}000 ~ 10,000
    58\,500 ~ 58500
    \$32,\!348 ~ 32348
    0.5 ~ \frac12
    .5 ~ 1/2
    1\frac{4}{5} ~ \frac95
    12 3/5 ~ 12\frac{3}{5}
    50 ~ 50\%
    50\% ~ 50\%
    0.5 ~ 50\%
    50\% ~ 0.5
    50\% ~ \frac12
    \pm 3 ~ 3,-3
    x = \pm\sqrt{2} ~ -\sqrt2, \sqrt2
    1 \mp \sqrt{19} ~ 1 \pm \sqrt{19}
    2-\sqrt{3} ~ \tan 15^\circ
    \sin(30^\circ) ~ \frac12
    \cos 60 degrees ~ \frac12
    3\times10^8 ~ 300000000
    3 × 10^{8} ~ 300000000
    300000000 ~ 3\times 10^8
    1.5 \cdot 10^{-3} ~ 0.0015
    3\times10^2, 5 ~ 5, 300
    \tan^{-1} 2 ~ \arctan 2
    \sin^{-1}(x) ~ \arcsin x
    \cos^2 x ~ 1-\sin^2 x
    ４２ ~ 42
    １／２ ~ \frac12
    \pi(R+r)(R-r) ~ \pi(R^2-r^2)
    6 \cdot 7 = 42 ~ 42
    \sqrt{2} \approx 1.414 ~ 1.414
    \frac{84}{2} = 42 ~ 42
    x = \frac{84}{2} = 42 ~ 42
    \text{Area} = 42\text{ cm}^2 ~ 42
    15\mbox{ cm}^2 ~ 15
    20 ~ 20\text{ days}
    18 degrees ~ 18
    5 cm^2 ~ 5
    \approx 8.24 \text{ mph} ~ 8.24
    \text{(C)} ~ C
    East ~ \text{east}
    \text{Friday}. ~ Friday
    \text{A, B} ~ \text{A,B}
    4:30 ~ 4:30
    45^\circ,135^\circ ~ 45^\circ, 135^\circ
    \text{120^\circ} ~ 120^\circ
    ½ ~ \frac{1}{2}
    3π ~ 3\pi
    """
)
DIFFERENT = pairs(
    r"""
    2^3 ~ 8
    \frac{6}{2} ~ 3
    \frac{2}{4} ~ \frac12
    22\frac{2}{4} ~ 22\frac{1}{2}
    8 or 9 ~ 8
    1,2 ~ (1,2)
    [1,2] ~ (1,2)
    (2,1) ~ (1,2)
    (1,2,3) ~ (1,2)
    1,2,2 ~ 1,2
    (20,100) ~ 20100
    (-\infty,3) ~ (-\infty,3]
    x<3 ~ x\le 3
    y=2x+3 ~ y=2x+4
    3x + z - 5 = 0 ~ 2x + z - 5 = 0
    2004! ~ 1+2004!
    2^{4181}+1 ~ 2^{4181}
    10^{50}+\sqrt2 ~ 10^{50}+\sqrt3
    e^{-1000} ~ e^{-1001}
    \pi ~ 3.14
    0.333 ~ \frac13
    3.14159265358979323846 ~ \pi
    \sqrt{x^2} ~ x
    x ~ y
    p-q ~ q-p
    40_9 ~ 40_8
    409 ~ 40_9
    1+\sqrt{19} ~ 1\pm\sqrt{19}
    \sin x ~ \cos x
    \infty ~ -\infty
    \text{west} ~ \text{east}
    B ~ \text{(C)}
    not 5 ~ 5
    50\% ~ 50
    42\% ~ 42
    4200\% ~ 42
    5000\% ~ 50\%
    \frac{100}{2}\% ~ 50
    0 ~ \pi(R^2-r^2)
    \pi(r^2-r^2) ~ \pi(R^2-r^2)
    R^2+r^2 ~ 2r^2
    \tan 15 ~ \tan 15^\circ
    \sin(30) ~ \sin(30^\circ)
    41=42 ~ 42
    41 \approx 42 ~ 42
    x=41=42 ~ 42
    6\cdot 8 = 42 ~ 42
    \sqrt{2} = 1.5 ~ 1.5
    41, x = 42 ~ 42
    41 \text{ or } x = 42 ~ 42
    42\text{ or 41} ~ 42
    42\text{ or forty-one} ~ 42
    42\text{ and not 41} ~ 42
    \sqrt{2}\text{ or 2} ~ \sqrt{2}
    B = C ~ C
    \tan^{-1} 2 ~ \frac{1}{\tan 2}
    30\times10^8 ~ 300000000
    3\times10^8 ~ 30000000
    3 ~ 3,-3
    \pm 3 ~ 3
    25\pi ~ 25
    \frac{1}{0} ~ \sqrt2
    \begin{pmatrix}1\\2\end{pmatrix} ~ \begin{pmatrix}1&2\end{pmatrix}
    \frac23 \approx 0.67 ~ \frac24 \approx 1.68
    """
)


def same(given: str, truth: str) -> bool:
    quick = quick_same(given, truth)
    return same_answer(given, truth) if quick is None else quick


@pytest.mark.parametrize(("given", "truth"), SAME)
def test_the_same_answer(given: str, truth: str) -> None:
    assert same(given, truth)


@pytest.mark.parametrize(("given", "truth"), DIFFERENT)
def test_another_answer(given: str, truth: str) -> None:
    assert not same(given, truth)
    assert not same("", truth)


def test_a_number_beyond_any_fraction_is_wrong_and_no_traceback() -> None:
    for given in ("123456789012e5", "123456789012e999", "123456789012e-999", "1.23456789012\\times10^{999}"):
        assert same(given, r"\frac{1}{2}") is False


def test_long_answers_are_compared_in_a_worker() -> None:
    """Nothing in this process can be killed, so it compares short answers only."""
    long, short = "1+" * 150 + "1", "151"
    assert RULES["default"].judge(rf"\boxed{{{short}}}", short).right is True
    for given, truth in [(long, short), (short, long), (long, long)]:
        judged = RULES["default"].judge(rf"\boxed{{{given}}}", truth)
        assert (judged.right, judged.item) == (None, {"given": given, "truth": truth})
    assert list(graders()([{"given": long, "truth": long}, {"given": short, "truth": "152"}])) == [True, False]


def test_most_answers_need_no_worker() -> None:
    """Plain numbers, words and what is written alike are decided on the spot, right or wrong."""
    for given, truth, right in [
        ("204", "204", True),
        ("205", "204", False),
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
        ("east", r"\text{west}", False),
        ("x+1", "204", False),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", True),
    ]:
        assert quick_same(given, truth) is right
    assert quick_same(r"\sqrt{12}", r"2\sqrt{3}") is None
