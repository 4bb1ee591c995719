"""Every way to decode that is compared, by name; the first is what the others are measured in."""

from __future__ import annotations

from collections.abc import Sequence

from dspark_fast.benchmark import ours, theirs
from dspark_fast.benchmark.way import Pair, Way

__all__ = ["BASELINE", "NO_DRAFTER", "WAYS", "Pair", "Way", "chosen"]

NO_DRAFTER = "no-drafter"

WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        Way("generate", "transformers, generate", theirs.plain),
        Way("static", "transformers, static+compile", theirs.static, compiles=True),
        Way("assisted", "transformers, assisted", theirs.assisted, theirs.one_row),
        Way("lookup", "transformers, prompt lookup", theirs.lookup, theirs.one_row),
        Way("notebook", "notebook's loop", ours.notebook, ours.notebook_takes),
        Way("no-cache", "notebook's loop, no cache", ours.no_cache, ours.notebook_takes, extra=True),
        Way("ours", "dspark-fast", ours.default, ours=True),
        Way("always", "dspark-fast, always drafting", ours.always, ours=True),
        Way("compiled", "dspark-fast, compiled target", ours.compiled, ours=True, compiles=True),
        Way(NO_DRAFTER, "dspark-fast, no drafter", ours.no_drafter, ours=True),
        Way("unpacked", "dspark-fast, weights unpacked", ours.unpacked, ours.needs_packing, ours=True),
        Way("no-graph", "dspark-fast, without graphs", ours.no_graph, ours.needs_graphs, ours=True),
        Way("reference", "dspark-fast, reference ops", ours.on_reference, ours.needs_kernels, ours=True),
        Way("autoregressive", "dspark-fast, small LM drafts", ours.autoregressive, ours.needs_assistant, ours=True),
    )
}

BASELINE = "generate"


def chosen(
    only: Sequence[str] = (), also: Sequence[str] = (), without: Sequence[str] = ()
) -> tuple[list[Way], dict[str, str]]:
    """The ways to run, in order, and why each other one is not.

    Args:
        only: names; none: all but those that are run on request.
        also: names of those.
        without: names to leave out.

    Raises:
        ValueError: for a name that is none, or without the baseline.
    """
    for name in (*only, *also, *without):
        if name not in WAYS:
            raise ValueError(f"the provider is {name!r}: accepted are {', '.join(WAYS)}")
    left_out = {}
    for name, way in WAYS.items():
        if name in without:
            left_out[name] = "--without"
        elif name in also or name in only:
            continue
        elif only:
            left_out[name] = "not among --providers"
        elif way.extra:
            left_out[name] = f"slow and there for comparison only: --also {name} runs it"
    if BASELINE in left_out:
        raise ValueError(f"{BASELINE} is left out, and it is what all others are measured in: keep it")
    return [way for name, way in WAYS.items() if name not in left_out], left_out
