r"""Converts LaTeX to plain text in the same way as pylatexenc 2, which the DeepScaleR verifier uses.

``\frac{3}{4}`` becomes ``3/4``, ``\sqrt[3]{2}`` becomes ``√(2)``, a matrix becomes ``[ 1 2; 3 4 ]``, and an unknown
command (``\cot``, ``\left``) is dropped. This is the library's behavior, right or wrong: only the reimplementation of
that verifier should use it. Linear in the length of the text times its depth, which is bounded.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

DEEPEST = 100
WIDEST_MATRIX = 20_000  # characters: every entry is padded to the widest one, and may be a matrix itself


def _pairs(text: str) -> dict[str, str]:
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


_SYMBOLS = _pairs(
    r"""
    alpha α beta β gamma γ delta δ epsilon ϵ zeta ζ eta η theta θ iota ι kappa κ lambda λ mu μ nu ν xi ξ pi π rho ρ
    sigma σ tau τ upsilon υ phi ϕ chi χ psi ψ omega ω omicron ο varepsilon ε vartheta ϑ varpi ϖ varrho ϱ varsigma ς
    varphi φ varkappa ϰ Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω Alpha Α
    Beta Β Epsilon Ε Zeta Ζ Eta Η Iota Ι Kappa Κ Mu Μ Nu Ν Omicron Ο Rho Ρ Tau Τ Chi Χ hbar ħ ell ℓ forall ∀
    exists ∃ nexists ∄ complement ∁ partial ∂ varnothing ∅ emptyset ∅ aleph ℵ nabla ∇ in ∈ notin ∉ ni ∋ prod ∏
    coprod ∐ sum ∑ setminus ∖ smallsetminus ∖ ast ∗ circ ∘ bullet ∙ propto ∝ infty ∞ parallel ∥ nparallel ∦ wedge ∧
    vee ∨ cap ∩ cup ∪ bigcap ⋂ bigcup ⋃ int ∫ iint ∬ iiint ∭ oint ∮ sim ∼ simeq ≃ approx ≈ neq ≠ equiv ≡ le ≤ ge ≥
    leq ≤ geq ≥ leqslant ⩽ geqslant ⩾ leqq ≦ geqq ≧ lneq ⪇ gneq ⪈ ll ≪ gg ≫ nless ≮ ngtr ≯ nleq ≰ ngeq ≱ prec ≺
    succ ≻ preceq ≼ succeq ≽ subset ⊂ supset ⊃ subseteq ⊆ supseteq ⊇ nsubseteq ⊈ nsupseteq ⊉ subsetneq ⊊
    supsetneq ⊋ cdot · times × otimes ⊗ oplus ⊕ ominus ⊖ odot ⊙ div ÷ dag † dagger † pm ± mp ∓ ldots … cdots ⋯
    ddots ⋱ vdots ⋮ dots … dotsc … dotsb … dotsm … dotsi … dotso … langle ⟨ rangle ⟩ lVert ‖ rVert ‖ Vert ‖ lvert |
    rvert | vert | mid | nmid ∤ lceil ⌈ rceil ⌉ lfloor ⌊ rfloor ⌋ uparrow ↑ downarrow ↓ rightarrow → to → leftarrow ←
    leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔ longrightarrow ⟶ longleftarrow ⟵ mapsto ↦ angle ∠
    measuredangle ∡ perp ⊥ cong ≅ asymp ≍ top ⊤ star ⋆ diamond ♢ square □ blacksquare ▪ lozenge ◊ bigcirc ◯
    therefore ∴ because ∵ lnot ¬ surd √ flat ♭ natural ♮ sharp ♯ wp ℘ triangleq ≜ triangleleft ◃ triangleright ▹
    bigtriangleup △ Longrightarrow ⟹ Longleftarrow ⟸ Longleftrightarrow ⟺ frown ⌢ smile ⌣
    cos cos sin sin tan tan arccos arccos arcsin arcsin arctan arctan cosh cosh sinh sinh tanh tanh
    arccosh arccosh arcsinh arcsinh arctanh arctanh
    ln ln log log exp exp max max min min sup sup inf inf lim lim prime ' & & $ $ { { } } # # _ _ % % lbrace {
    rbrace } backslash \ textbackslash \ textdegree ° textdollar $ textbullet • textcent ¢ texteuro €
    o ø O Ø l ł L Ł i ı j ȷ ss ß ae æ AE Æ oe œ OE Œ aa å AA Å
    """
) | {",": " ", ";": " ", ":": " ", " ": " ", "!": "", "quad": "  ", "qquad": "    ", "limsup": "lim sup"}

_LIGATURES = {"~": "\u00a0", "``": "“", "''": "”", "--": "–", "---": "—", "!`": "¡", "?`": "¿"}
_LIGATURE = re.compile(r"---|--|``|''|!`|\?`|~")

# The two separators of a matrix, in a form that no text has.
_NEXT_CELL, _NEXT_ROW = "\x00&", "\x00\\"

_KEPT = (
    *("text", "textrm", "textit", "textbf", "textsc", "textsl", "emph", "mathrm", "ensuremath"),
    *("overline", "underline", "widehat", "widetilde", "wideparen", "overbrace", "underbrace"),
    *("overleftarrow", "overrightarrow", "overleftrightarrow"),
)
_DROPPED = {
    "{": ("mbox", "textmd", "textsf", "texttt", "textup", "label", "hspace", "vspace"),
    "[{": ("hphantom", "vphantom", "xleftarrow", "xrightarrow", "color"),
}
_STYLES = {
    "mathbf": "BOLD",
    "mathit": "ITALIC",
    "mathsf": "SANS-SERIF",
    "mathbb": "DOUBLE-STRUCK",
    "mathtt": "MONOSPACE",
    "mathcal": "SCRIPT",
    "mathscr": "SCRIPT",
    "mathfrak": "FRAKTUR",
}
_ACCENTS = {
    name: chr(int(code, 16))
    for name, code in _pairs(
        """
        ' 301 ` 300 " 308 ^ 302 ~ 303 c 327 H 30b k 328 = 304 b 331 . 307 d 323 r 30a u 306 v 30c vec 20d7 dot 307
        hat 302 check 30c breve 306 acute 301 grave 300 tilde 303 bar 305 ddot 308 not 338
        """
    ).items()
}
_MATRICES = {"array", "pmatrix", "bmatrix", "smallmatrix", "psmallmatrix", "bsmallmatrix"}
_EQUATIONS = {name + star for name in ("equation", "eqnarray", "align", "multline", "gather") for star in ("", "*")}


@dataclass(frozen=True)
class _Macro:
    """A command: its arguments, ``{`` for a required and ``[`` for an optional one, and a function from their texts to
    its text."""

    arguments: str
    text: Callable[[list[str]], str]


def _styled(style: str, text: str) -> str:
    return "".join(
        _styled_letter(style, letter) if letter.isascii() and letter.isalpha() else letter for letter in text
    )


def _styled_letter(style: str, letter: str) -> str:
    name = f"{'CAPITAL' if letter.isupper() else 'SMALL'} {letter.upper()}"
    # Letters that Unicode had before the mathematical alphabets kept their old names.
    for family in (f"MATHEMATICAL {style}", style, {"FRAKTUR": "BLACK-LETTER"}.get(style, style)):
        try:
            return unicodedata.lookup(f"{family} {name}")
        except KeyError:
            continue
    return "ℎ" if (style, letter) == ("ITALIC", "h") else letter


def _accented(accent: str, text: str) -> str:
    return unicodedata.normalize("NFC", "".join(letter + accent for letter in text[:1])) + text[1:]


def _macros() -> dict[str, _Macro]:
    known = {name: _Macro("", lambda _, text=text: text) for name, text in _SYMBOLS.items()}  # type: ignore[misc]
    known |= {name: _Macro("{", lambda given: given[0]) for name in _KEPT}
    known |= {name: _Macro(arguments, lambda _: "") for arguments, names in _DROPPED.items() for name in names}
    for name, style in _STYLES.items():
        known[name] = _Macro("{", lambda given, style=style: _styled(style, given[0]))  # type: ignore[misc]
    for name, accent in _ACCENTS.items():
        known[name] = _Macro("{", lambda given, accent=accent: _accented(accent, given[0]))  # type: ignore[misc]
    known |= {name: _Macro("{{", lambda given: f"{given[0]}/{given[1]}") for name in ("frac", "nicefrac")}
    known["sqrt"] = _Macro("[{", lambda given: f"√({given[1]})")
    known["textcolor"] = _Macro("[{{", lambda given: given[2])
    return known


_KNOWN = _macros()
_UNKNOWN = _Macro("", lambda _: "")


class _Reader:
    """Parses LaTeX into pieces: text, and the two separators of a matrix as pieces of their own."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._depth = 0

    def pieces(self, end: str = "") -> list[str]:
        """Pieces up to ``end`` (consumed), which is ``}``, a closing delimiter, ``\\end`` or the end of the text."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError("nested too deep")
        found: list[str] = []
        while self._at < len(self._source):
            if self._closes(end):
                break
            piece = self._piece()
            if piece is not None:
                found.append(piece)
        self._depth -= 1
        return found

    def _closes(self, end: str) -> bool:
        if end == "\\end":
            closing = re.compile(r"\\end\s*\{[\w* ._-]+\}").match(self._source, self._at)
            if closing:
                self._at = closing.end()
            return closing is not None
        if end and self._source.startswith(end, self._at):
            self._at += len(end)
            return True
        return False

    def _piece(self) -> str | None:
        source, at = self._source, self._at
        character = source[at]
        if character == "\\":
            return self._command()
        self._at += 1
        if character == "{":
            return _text(self.pieces("}"))
        if character == "}":
            return None  # closes nothing: skipped
        if character == "&":
            return _NEXT_CELL
        if ligature := _LIGATURE.match(source, at):
            self._at = ligature.end()
            return _LIGATURES[ligature.group()]
        return character

    def _command(self) -> str | None:
        if self._closes("\\end"):
            return None  # of an environment that was never opened
        name = self._name()
        match name:
            case "":
                return None
            case "(":
                return _text(self.pieces("\\)")).strip()
            case "[":
                return _indented(_text(self.pieces("\\]")).strip())
            case ")" | "]":
                return None
            case "\\":
                self._optional(spaces=False)
                return _NEXT_ROW
            case "begin":
                return self._environment()
        if name.isalpha():
            self._skip_space()
        macro = _KNOWN.get(name, _UNKNOWN)
        return macro.text([self._optional() if kind == "[" else self._argument() for kind in macro.arguments])

    def _name(self) -> str:
        found = re.compile(r"\\([^\W\d_]+|.|)", re.DOTALL).match(self._source, self._at)
        assert found is not None
        self._at = found.end()
        return found.group(1)

    def _environment(self) -> str:
        named = re.compile(r"\s*\{([\w* ._-]+)\}").match(self._source, self._at)
        if named is None:
            return "\\begin"
        self._at = named.end()
        name = named.group(1)
        if name == "array":
            self._optional()
            self._argument()
        pieces = self.pieces("\\end")
        if name in _MATRICES:
            return _matrix(pieces)
        return _indented(_text(pieces).strip()) if name in _EQUATIONS else _text(pieces)

    def _argument(self) -> str:
        """A group, a command without arguments of its own, or one character."""
        self._skip_space()
        if self._at >= len(self._source) or self._source[self._at] == "}":
            return ""
        if self._source[self._at] == "{":
            self._at += 1
            return _text(self.pieces("}"))
        if self._source[self._at] == "\\":
            name = self._name()
            if name.isalpha():
                self._skip_space()
            macro = _KNOWN.get(name, _UNKNOWN)
            return macro.text(["" for _ in macro.arguments])
        self._at += 1
        return self._source[self._at - 1]

    def _optional(self, spaces: bool = True) -> str:
        start = self._at
        if spaces:
            self._skip_space()
        if self._source.startswith("[", self._at):
            self._at += 1
            return _text(self.pieces("]"))
        self._at = start
        return ""

    def _skip_space(self) -> None:
        while self._at < len(self._source) and self._source[self._at].isspace():
            self._at += 1


def _text(pieces: list[str]) -> str:
    return "".join({_NEXT_CELL: "   ", _NEXT_ROW: "\n"}.get(piece, piece) for piece in pieces)


def _indented(text: str) -> str:
    return "\n    " + text.replace("\n", "\n    ") + "\n"


def _matrix(pieces: list[str]) -> str:
    """``[ 1 2; 3 4 ]`` with right-aligned entries. A cell with nothing in it, not even a blank, is dropped."""
    rows: list[list[str]] = [[]]
    cell: list[str] = []
    for piece in [*pieces, _NEXT_ROW]:
        if piece in (_NEXT_CELL, _NEXT_ROW):
            if cell:
                rows[-1].append(_text(cell).strip())
            cell = []
            if piece == _NEXT_ROW:
                rows.append([])
        else:
            cell.append(piece)
    rows.pop()
    width = max(len(entry) for row in rows for entry in row)  # ValueError without entries, as in the library
    if width * sum(map(len, rows)) > WIDEST_MATRIX:
        raise ValueError("a matrix too wide")
    return "[ " + "; ".join(" ".join(entry.rjust(width) for entry in row) for row in rows) + " ]"


def latex_to_text(source: str) -> str:
    """The plain text. Raises ValueError where the library fails too, and if the nesting is too deep."""
    return _text(_Reader(source).pieces())
