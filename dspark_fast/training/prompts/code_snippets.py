"""Short pieces of code to explain or to improve, and the same pieces with a bug to find.

In `code_snippets.json`, $f stands for the name of a function, $C for that of a class, $x and $y for variables.
"""

from __future__ import annotations

import random
import re

from dspark_fast.training.prompts.grammar import load_parts

_PARTS = load_parts("code_snippets")


def draw_snippet(rng: random.Random) -> str:
    """A snippet with drawn names, and what to do with it."""
    snippet = rng.choice(_PARTS["snippet"])
    wrong = rng.random() < 0.5
    x, y = rng.sample(_PARTS["variable"], 2)
    names = {"f": rng.choice(_PARTS["function"]), "C": rng.choice(_PARTS["class"]), "x": x, "y": y}
    code = "\n".join(snippet["bad" if wrong else "good"])
    code = re.sub(r"\$(f(?!ile)|C|x|y)", lambda match: names[match.group(1)], code)  # $file is the shell's own
    language = snippet["language"]
    other = rng.choice([lang for lang in ("Python", "JavaScript", "Go", "Java", "Rust") if lang.lower() != language])
    form = rng.choice(_PARTS["bug_form" if wrong else "good_form"])
    return form.format(code=f"```{language}\n{code}\n```", lang=other)
