"""``dspark-fast chat``: a conversation on the terminal."""

from __future__ import annotations

import contextlib
import sys

from rich.console import Console

from dspark_fast.cli import options as o
from dspark_fast.cli.app import app
from dspark_fast.cli.session import Message, Session, Settings, TextStream, note, plain_errors, write

HELP = """/reset  forget the conversation
/help   this
/exit   end, as Ctrl-D does
Ctrl-C  stop the answer"""


@app.command()
def chat(
    model: o.Model = o.DEFAULT_MODEL,
    draft: o.Draft = None,
    dtype: o.Dtype = o.DtypeName.auto,
    device: o.Device = None,
    max_new_tokens: o.MaxNewTokens = 512,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = None,
    verification: o.Verify = None,
    confidence_threshold: o.Confidence = 0.0,
    no_markov: o.NoMarkov = False,
    no_draft: o.NoDraft = False,
    threads: o.Threads = None,
    pack_weights: o.PackWeights = None,
    system: o.System = None,
) -> None:
    """Talk with the model; it remembers the conversation.

    /reset forgets it, /help lists the commands, /exit or Ctrl-D ends, Ctrl-C stops an answer.
    """
    o.check_no_draft(no_draft, draft, no_markov, confidence_threshold)
    settings = Settings(
        model=model,
        draft=draft,
        dtype=dtype.value,
        device=device,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        verification=verification.value if verification is not None else None,
        confidence_threshold=confidence_threshold,
        use_markov=not no_markov,
        system=system,
        use_draft=not no_draft,
        threads=threads,
        pack_weights=pack_weights,
    )
    with plain_errors():
        session = Session(settings)
        if not session.has_template:
            raise ValueError(f"{model} has no chat template: `dspark-fast generate` can still continue a text")
    if sys.stdin.isatty():
        note("/help lists the commands, Ctrl-D ends.")
    _talk(session)


def _talk(session: Session) -> None:
    opening: list[Message] = []
    if session.settings.system is not None:
        opening = [{"role": "system", "content": session.settings.system}]
    messages = list(opening)
    while (line := _line()) is not None:
        if not line:
            continue
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(opening)
            note("The conversation is forgotten.")
        elif line == "/help":
            print(HELP)
        elif line.startswith("/"):
            note(f"There is no command {line.split()[0]}: /help lists them")
        else:
            _turn(session, messages, line)


def _turn(session: Session, messages: list[Message], line: str) -> None:
    """One question and its answer, or the part of it that came before Ctrl-C; both go into ``messages``."""
    stream = TextStream(session.tokenizer, write)
    question = {"role": "user", "content": line}
    figures = "stopped"
    try:
        answer = session.answer(session.conversation([*messages, question]), stream)
        figures = session.figures(answer.stats)
    except KeyboardInterrupt:
        stream.end()
    except (ValueError, FloatingPointError) as error:
        write("\n" if stream.tokens else "")
        note(f"Error: {error} (/reset starts over)")
        return
    messages += [question, {"role": "assistant", "content": stream.text()}]
    write("\n")
    Console(highlight=False, soft_wrap=True).print(figures, style="dim", markup=False)


def _line() -> str | None:
    """The next line of the user's, None at the end of the input."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.strip() if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then edits lines and remembers them)
    while True:
        try:
            return input("> ").strip()
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            note("/exit or Ctrl-D ends.")
