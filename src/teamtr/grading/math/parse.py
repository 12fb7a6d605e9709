r"""Parses an answer in LaTeX, or in plain keyboard notation, into a tree.

It covers what occurs in the benchmarks' answers and no more: arithmetic, roots, the usual functions, tuples, intervals,
sets, lists, unions, matrices, equations and inequalities. Anything else raises ``UnreadableError``. Nothing is
evaluated, and depth and length are bounded.

    parse(r"(-\infty, \frac{1}{2}]")     # Node("tuple", (Node("neg", (Node("infinity"),)), Node("/", ...)), "(]")
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, NoReturn

from teamtr.grading.math.text import clean, without_units
from teamtr.grading.math.tokens import FUNCTIONS, GREEK, RELATIONS, UnreadableError, tokens

DEEPEST = 40


@dataclass(frozen=True)
class Node:
    """An operation on its parts. ``name`` is that of a symbol, function or relation, or the two brackets of a tuple.

    Kinds: number (with ``value``), symbol, infinity, based, text; + * / ^ neg ! pm call; list, set, tuple, union,
    matrix (of rows), row; relation (its sides, with the signs between them in ``name``, separated by blanks).
    """

    kind: str
    parts: tuple[Node, ...] = ()
    name: str = ""
    value: Fraction = Fraction(0)


_MATRICES = {"pmatrix", "bmatrix", "matrix", "vmatrix", "Bmatrix", "smallmatrix", "array"}
_SAYS_MORE = re.compile(r"\d|\b(?:or|and|not|nor)\b")
"""Matches text after a value that is more than a unit."""
_CLOSING = {"(": ")", "[": "]"}
_NO_FACTORS = {"\\cup", "\\pm", "\\mp", "\\cdot", "\\times", "\\ast", "\\div", "\\end", "\\\\"}
_NO_FACTORS |= {"\\degree", "\\}", "\\rfloor", "\\rceil", "\\rvert"}


_INVERTED = {"sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh"}
_ONE_BELOW_ZERO = Node("neg", (Node("number", value=Fraction(1)),))
_DEGREE = Node("/", (Node("symbol", name="\\pi"), Node("number", value=Fraction(180))))


def parse(text: str) -> Node:
    """The tree of an answer as a model or a data set wrote it."""
    return _Parser(without_units(clean(text))).whole()


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = tokens(text)
        self._at = 0
        self._depth = 0

    def whole(self) -> Node:
        if not self._tokens:
            raise UnreadableError("nothing there")
        node = self._list()
        if self._at < len(self._tokens):
            self._fail()
        return node

    # From the loosest binding to the tightest

    def _list(self) -> Node:
        items = [self._statement()]
        while self._take(",", ";"):
            while self._take(",", ";"):  # ", and"
                pass
            items.append(self._statement())
        return items[0] if len(items) == 1 else Node("list", tuple(items))

    def _statement(self) -> Node:
        self._enter()
        sides, signs = [self._union()], []
        while self._peek() in RELATIONS:
            signs.append(RELATIONS[self._next()])
            sides.append(self._union())
        self._leave()
        return sides[0] if not signs else Node("relation", tuple(sides), " ".join(signs))

    def _union(self) -> Node:
        parts = [self._sum()]
        while self._take("\\cup"):
            parts.append(self._sum())
        return parts[0] if len(parts) == 1 else Node("union", tuple(parts))

    def _sum(self) -> Node:
        if self._take("\\pm"):
            left = Node("pm", (Node("number"), self._product()))
        elif self._take("\\mp"):
            left = Node("pm", (Node("number"), Node("neg", (self._product(),))))
        else:
            left = self._product()
        while True:
            if self._take("+"):
                left = Node("+", (left, self._product()))
            elif self._take("-"):
                left = Node("+", (left, Node("neg", (self._product(),))))
            elif self._take("\\pm"):
                left = Node("pm", (left, self._product()))
            elif self._take("\\mp"):
                left = Node("pm", (left, Node("neg", (self._product(),))))
            else:
                return left

    def _product(self) -> Node:
        left = self._signed()
        while True:
            if self._take("*", "\\cdot", "\\times", "\\ast"):
                left = Node("*", (left, self._signed()))
            elif self._take("/", "\\div", ":"):
                left = Node("/", (left, self._signed()))
            elif self._begins_factor():
                if (self._peek() or "").startswith("\\text{") and _SAYS_MORE.search(self._peek() or ""):
                    self._fail()
                right = self._power()
                left = left if right.kind == "text" else Node("*", (left, right))  # a unit is ignored
            else:
                return left

    def _signed(self) -> Node:
        if self._take("-"):
            self._enter()
            node = Node("neg", (self._signed(),))
            self._leave()
            return node
        self._take("+")
        return self._power()

    def _power(self) -> Node:
        base = self._primary()
        while True:
            if self._take("!"):
                base = Node("!", (base,))
            elif self._take("%"):
                base = Node("/", (base, Node("number", value=Fraction(100))), "%")
            elif self._take("\\degree"):
                base = Node("*", (base, _DEGREE))
            elif self._take("^", "**"):
                exponent = self._script()
                base = base if base.kind == "text" else Node("^", (base, exponent))
            else:
                return base

    def _script(self) -> Node:
        """A superscript or subscript: a group, or one item that may have a sign."""
        self._enter()
        node = Node("neg", (self._script(),)) if self._take("-") else self._primary(single=True)
        if node.kind == "number" and self._peek() == "^":
            self._fail()  # 2^3^4 is not LaTeX
        self._leave()
        return node

    # Items

    def _begins_factor(self) -> bool:
        token = self._peek()
        if token is None or token in _NO_FACTORS:
            return False
        if token[0].isdigit() or token[0] == ".":
            return not self._tokens[self._at - 1][0].isdigit()  # 2 3 is not a product
        return token in ("(", "[", "{") or token[0].isalpha() or (token[0] == "\\" and token not in RELATIONS)

    def _primary(self, single: bool = False) -> Node:
        self._enter()
        token = self._next()
        if token[0].isdigit() or token[0] == ".":
            node = self._number(token, single)
        elif token[0].isalpha():
            node = self._symbol(token)
        elif token.startswith("\\text{"):
            node = Node("text", name="".join(token[6:].casefold().split()))
        elif token[0] == "\\":
            node = self._command(token[1:])
        elif token == "{":
            node = self._until("}")
        elif token in _CLOSING:
            node = self._bracketed(token)
        elif token == "|":
            node = Node("call", (self._until("|"),), "abs")
        else:
            self._fail()
        self._leave()
        return node

    def _number(self, token: str, single: bool) -> Node:
        if (
            single and len(token) > 1 and token.isdigit()
        ):  # x^12 is x^1 times 2 in LaTeX, but the exponent 12 is what is meant
            return Node("number", value=Fraction(token))
        if self._take("_"):
            base = self._script()
            if base.kind != "number" or not token.isdigit():
                self._fail()
            return Node("based", name=f"{token.lstrip('0') or '0'}_{base.value}")
        number = Node("number", value=Fraction(token))
        mixed = self._plain_fraction() if token.isdigit() and not single else None
        return number if mixed is None else Node("+", (number, mixed), "mixed")

    def _plain_fraction(self) -> Node | None:
        r"""The ``\frac{3}{5}`` of ``12\frac{3}{5}``, if both are numbers and the second is larger; else None."""
        ahead = self._tokens[self._at : self._at + 7]
        match ahead:
            case ["\\frac", "{", top, "}", "{", bottom, "}"] if top.isdigit() and bottom.isdigit():
                taken = 7
            case ["\\frac", digits, *_] if digits.isdigit() and len(digits) == 2:
                top, bottom, taken = digits[0], digits[1], 2
            case _:
                return None
        if not int(top) < int(bottom):
            return None
        self._at += taken
        return Node(
            "/", (Node("number", value=Fraction(int(top))), Node("number", value=Fraction(int(bottom)))), "frac"
        )

    def _symbol(self, name: str) -> Node:
        while self._take("'"):
            name += "'"
        if self._take("_"):
            below = self._script()
            name += f"_{below.name or below.value}"
        return Node("symbol", name=name)

    def _command(self, name: str) -> Node:
        if name in GREEK:
            return self._symbol("\\" + name)
        if name in FUNCTIONS and name not in ("sqrt", "binom"):
            return self._function(name)
        handler = self._HANDLERS.get(name)
        if handler is None:
            self._fail()
        return handler(self)

    def _fraction(self) -> Node:
        return Node("/", self._two_arguments(), "frac")

    def _root(self) -> Node:
        degree = self._until("]") if self._take("[") else Node("number", value=Fraction(2))
        return Node("call", (self._argument(), degree), "root")

    def _binomial(self) -> Node:
        return Node("call", self._two_arguments(), "binom")

    def _two_arguments(self) -> tuple[Node, Node]:
        token = self._peek()
        if token is not None and token.isdigit() and len(token) >= 2:  # \frac12
            self._at += 1
            if len(token) > 2:
                self._fail()
            return Node("number", value=Fraction(token[0])), Node("number", value=Fraction(token[1]))
        return self._argument(), self._argument()

    def _argument(self) -> Node:
        """A group, or one item; of a number, its first digit."""
        token = self._peek()
        if token is not None and token.isdigit() and len(token) > 1:
            self._tokens[self._at : self._at + 1] = [token[0], token[1:]]
        return self._primary(single=True)

    def _function(self, name: str) -> Node:
        r"""``\sin x``, ``\sin^2 x``, ``\sin^{-1} x`` (the inverse), ``\log_2 8``: applied to brackets, or to the
        product that follows."""
        below = self._script() if self._take("_") else None
        power = self._script() if self._take("^", "**") else None
        if power == _ONE_BELOW_ZERO and name in _INVERTED:
            name, power = f"arc{name}", None
        if self._peek() in ("(", "{", "[", "|"):
            argument = self._primary()
            if self._take("\\degree"):
                argument = Node("*", (argument, _DEGREE))
        else:
            argument = self._signed()
            while self._begins_factor() and not self._begins_function():
                argument = Node("*", (argument, self._power()))
        if argument.kind == "tuple" and name in ("max", "min"):
            node = Node("call", argument.parts, name)
        else:
            node = Node("call", (argument,) if below is None else (argument, below), name)
        return node if power is None else Node("^", (node, power))

    def _begins_function(self) -> bool:
        token = self._peek()
        return token is not None and token[1:] in FUNCTIONS - {"sqrt", "binom"} and token[0] == "\\"

    def _bracketed(self, opening: str) -> Node:
        inner = self._list()
        closing = self._next()
        if closing not in (")", "]"):
            self._fail()
        if inner.kind == "list":
            return Node("tuple", inner.parts, opening + closing)
        if closing != _CLOSING[opening]:
            self._fail()
        if self._take("_"):  # (1001)_2
            base = self._script()
            if inner.kind != "number" or base.kind != "number":
                self._fail()
            return Node("based", name=f"{inner.value}_{base.value}")
        return inner

    def _set(self) -> Node:
        if self._take("\\}"):
            return Node("set")
        inner = self._until("\\}")
        return Node("set", inner.parts if inner.kind == "list" else (inner,))

    def _matrix(self) -> Node:
        name = self._environment()
        if name not in _MATRICES:
            self._fail()
        if name == "array":
            while self._next() != "}":
                pass
        rows: list[Node] = []
        while not self._take("\\end"):
            cells = [self._statement()]
            while self._take("&"):
                cells.append(self._statement())
            rows.append(Node("row", tuple(cells)))
            if not self._take("\\\\") and self._peek() != "\\end":
                self._fail()
        self._environment()
        return Node("matrix", tuple(rows))

    def _environment(self) -> str:
        if not self._take("{"):
            self._fail()
        name = ""
        while (token := self._next()) != "}":
            name += token
        return name

    def _until(self, closing: str) -> Node:
        inner = self._list()
        if not self._take(closing):
            self._fail()
        return inner

    _HANDLERS: ClassVar[dict[str, Callable[[_Parser], Node]]] = {
        "frac": _fraction,
        "sqrt": _root,
        "binom": _binomial,
        "dbinom": _binomial,
        "{": _set,
        "begin": _matrix,
        "pi": lambda self: Node("symbol", name="\\pi"),
        "infty": lambda self: Node("infinity"),
        "inf": lambda self: Node("infinity"),
        "oo": lambda self: Node("infinity"),
        "emptyset": lambda self: Node("set"),
        "varnothing": lambda self: Node("set"),
        "lfloor": lambda self: Node("call", (self._until("\\rfloor"),), "floor"),
        "lceil": lambda self: Node("call", (self._until("\\rceil"),), "ceil"),
        "lvert": lambda self: Node("call", (self._until("\\rvert"),), "abs"),
        "mathbb": lambda self: Node("symbol", name="\\mathbb" + self._argument().name),
    }

    # Tokens

    def _peek(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _next(self) -> str:
        token = self._peek()
        if token is None:
            self._fail()
        self._at += 1
        return token

    def _take(self, *wanted: str) -> bool:
        if self._peek() in wanted:
            self._at += 1
            return True
        return False

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise UnreadableError("nested too deep")

    def _leave(self) -> None:
        self._depth -= 1

    def _fail(self) -> NoReturn:
        raise UnreadableError(f"at {''.join(self._tokens[self._at : self._at + 5])!r}")
