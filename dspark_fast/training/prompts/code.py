"""Code: programs to write, SQL, the shell, web pages, regular expressions, concepts, and code to explain or to fix."""

from __future__ import annotations

import random

from dspark_fast.training.prompts.code_snippets import draw_snippet
from dspark_fast.training.prompts.code_stdlib import draw_stdlib
from dspark_fast.training.prompts.draft import Draft, draw_follow_ups, weighted
from dspark_fast.training.prompts.grammar import load_parts

_PARTS = load_parts("shared", "code")
_KINDS = {"task": 46, "sql": 9, "shell": 8, "web": 8, "regex": 6, "difference": 7, "idea": 12}


def draw_code(rng: random.Random) -> Draft | None:
    """A request about code, or None where it needs a function that this Python does not have."""
    text = weighted(rng, {draw_stdlib: 36, draw_snippet: 18, _request: 46})(rng)
    if text is None:
        return None
    system = "You are an expert programmer. Answer with code first." if rng.random() < 0.03 else None
    return Draft(text, system, draw_follow_ups(rng, _fitting_follow_ups(text), 0.09))


def _fitting_follow_ups(text: str) -> list[str]:
    """Turns that make sense after the answer: those about code only where the request asks for some."""
    asks_for_code = text.startswith(("Write", "In ", "Can you write", "Implement", "I need", "Show", "Create", "Fix"))
    pool = _PARTS["follow_up"] if asks_for_code else _PARTS["more_explain"]
    if any(language in text for language in ("JavaScript", "SQL", "HTML")):
        pool = [turn for turn in pool if not any(word in turn for word in ("JavaScript", "class", "type hints"))]
    return pool


def _request(rng: random.Random) -> str:
    """A form of the drawn kind, filled."""
    kind = weighted(rng, _KINDS)
    language = rng.choice(_PARTS["language"])
    if kind == "task":
        text = rng.choice(_PARTS["task_form"]).format(lang=language, op=rng.choice(_PARTS["task"]))
        extra = rng.choice(_PARTS["task_extra"])
        return text + ("." if extra and not text.endswith((".", "?")) else "") + extra
    if kind == "sql":
        table, columns, group, value = rng.choice(_PARTS["sql_table"])
        task = rng.choice(_PARTS["sql"]).format(g=group, v=value)
        return rng.choice(_PARTS["sql_form"]).format(task=task, table=table, columns=columns)
    if kind == "shell":
        extension = rng.choice(("txt", "log", "csv", "py", "jpg", "md", "json", "html"))
        task = rng.choice(_PARTS["shell"]).format(e=extension, n=rng.choice((3, 5, 7, 10, 20, 30)))
        return rng.choice(_PARTS["shell_form"]).format(t=task)
    form, thing = rng.choice(_PARTS[f"{kind}_form"]), rng.choice(_PARTS[kind])
    if kind == "regex":
        language = rng.choice(_PARTS["language"][:10])
    text = form.format(t=thing, lang=language)
    return text[:1].upper() + text[1:]
