r"""LaTeX formulas as plain text: \(\frac{a}{b} \times x^2\) becomes a/b × x².

Owns the recognition of formulas and the text of commands; must not know blocks or the terminal. An unknown command
stays as it is.
"""

from __future__ import annotations

import re

CLOSING = {r"\(": r"\)", r"\[": r"\]", "$$": "$$", "$": "$"}

_AMOUNT = re.compile(r"\$\d[\d.,]*(?![\w.,^\\{*/+=$-])")  # of money
_MARKS = re.compile(r"(?<!\\)\\[\[\]()]|\$\$")
_HAS_CONTENT = re.compile(r"\w")
_GROUP = r"\{((?:[^{}]|\{[^{}]*\})*)\}"
_FRACTION = re.compile(rf"\\[dt]?frac\s*{_GROUP}\s*{_GROUP}")
_ROOT = re.compile(rf"\\sqrt\s*{_GROUP}")
_WORDS = re.compile(
    rf"\\(?:text|textbf|mathrm|mathbf|mathit|mathbb|mathcal|operatorname|boxed|bar|hat|vec)\*?\s*{_GROUP}"
)
_ENVIRONMENT = re.compile(
    r"\\(?:begin|end)\s*\{[^{}]*\}(?:\{[^{}]*\})?|\\(?:left|right|displaystyle|limits)(?![a-zA-Z])"
)
_SCRIPT = re.compile(rf"([\^_])(?:{_GROUP}|(\w|\\[a-zA-Z]+))")
_COMMAND = re.compile(r"\\([a-zA-Z]+) ?|\\(.)")

_SYMBOLS: dict[str, str] = dict(
    re.findall(
        r"(\w+)=(\S+)",
        "alpha=α beta=β gamma=γ delta=δ epsilon=ε varepsilon=ε zeta=ζ eta=η theta=θ iota=ι kappa=κ lambda=λ mu=μ nu=ν "
        "xi=ξ pi=π rho=ρ sigma=σ tau=τ phi=φ varphi=φ chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Pi=Π "
        "Sigma=Σ Phi=Φ Psi=Ψ Omega=Ω times=× cdot=· div=÷ pm=± mp=∓ le=≤ leq=≤ ge=≥ geq=≥ ne=≠ neq=≠ approx=≈ equiv=≡ "
        "sim=∼ "
        "propto=∝ infty=∞ sum=∑ prod=∏ int=∫ partial=∂ nabla=∇ to=→ rightarrow=→ leftarrow=← Rightarrow=⇒ implies=⇒ "
        "iff=⇔ leftrightarrow=↔ in=∈ notin=∉ subset=⊂ subseteq=⊆ cup=∪ cap=∩ emptyset=∅ forall=∀ exists=∃ neg=¬ land=∧ "
        "wedge=∧ lor=∨ vee=∨ therefore=∴ angle=∠ circ=° degree=° ldots=… dots=… cdots=⋯ perp=⊥ parallel=∥ ast=* "
        "lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ langle=⟨ rangle=⟩ mid=| sin=sin cos=cos tan=tan log=log ln=ln exp=exp "
        "lim=lim min=min max=max",
    )
)
_SPACES = {"quad": "  ", "qquad": "    ", "\\": "\n", ",": " ", ";": " ", ":": " ", " ": " ", "!": ""}
_RAISED = str.maketrans("0123456789+-=()nixyabcdekmt", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱˣʸᵃᵇᶜᵈᵉᵏᵐᵗ")
_LOWERED = str.maketrans("0123456789+-=()aeijklmnprstuvx", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑᵢⱼₖₗₘₙₚᵣₛₜᵤᵥₓ")


def readable(source: str) -> str:
    """Return a formula, or a line of one, as text."""
    text = _ENVIRONMENT.sub("", _MARKS.sub("", source)).replace("&", "")
    for _ in range(3):  # fractions in fractions
        text = _FRACTION.sub(lambda match: f"{_grouped(match[1])}/{_grouped(match[2])}", text)
        text = _ROOT.sub(lambda match: f"√{_grouped(match[1])}", text)
        text = _WORDS.sub(r"\1", text)
    text = _SCRIPT.sub(_script, text)
    text = _COMMAND.sub(_command, text)
    return re.sub(r" {2,}", " ", text.replace("{", "").replace("}", "")).strip()


def formula_begins(line: str) -> int:
    """Return the length of the mark that opens a formula in lines of its own, 0 if the line opens none."""
    start = 2 if line[:2] in {r"\[", "$$"} else 0
    if not start or line == line[:2]:
        return start
    end = line.find(CLOSING[line[:2]], 2)
    return start if end == len(line) - 2 and _HAS_CONTENT.search(line[2:end]) else 0


def formula_end(text: str, at: int) -> int:
    """Return the end of the formula that opens at a position; 0 if there is none, -1 if it is incomplete."""
    opening = next((mark for mark in (r"\(", r"\[", "$$", "$") if text.startswith(mark, at)), "")
    start = at + len(opening)
    if not opening or (opening == "$" and (text[start : start + 1].isspace() or _AMOUNT.match(text, at))):
        return 0
    end = text.find(CLOSING[opening], start)
    if end < 0:
        return -1
    single = opening == "$" and (
        text[end - 1].isspace() or text[end + 1 : end + 2].isalnum() or "\n" in text[start:end]
    )
    is_one = _HAS_CONTENT.search(text, start, end) and not single
    return end + len(CLOSING[opening]) if is_one else 0


def _grouped(text: str) -> str:
    """Return the text, in brackets if it would be misread without."""
    text = text.strip()
    return text if re.fullmatch(r"\w*|\\[a-zA-Z]+|\w\^\{?\w\}?", text) else f"({text})"


def _script(match: re.Match[str]) -> str:
    text = (match[2] if match[2] is not None else match[3]).strip()
    small = text.translate(_RAISED if match[1] == "^" else _LOWERED)
    if not any(one == other for one, other in zip(text, small, strict=True)):
        return small
    return "°" if text == r"\circ" else match[1] + (text if len(text) == 1 or match[3] else f"({text})")


def _command(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    if name in _SPACES:
        return _SPACES[name]
    if name in _SYMBOLS:
        return _SYMBOLS[name] + (" " if match[0].endswith(" ") else "")
    return match[0] if match[1] else name
