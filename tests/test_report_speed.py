"""The report's speeds: against a hand computation, and of a pair whose tokens are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_subjects import again, quietly

from dspark_fast.report.speed import Run, Speed
from dspark_fast.report.subject import Equality


@pytest.fixture(scope="module")
def subject(make_subject):
    return make_subject()


def test_speed_by_hand():
    def runs(prompt, repeat, *speeds):
        ways = zip(("plain", "autoregressive", "dspark"), speeds)
        return [Run(prompt, repeat, way, 0.1 * (place + 1), 10 / speed, 11) for place, (way, speed) in enumerate(ways)]

    found = Speed("small", (*runs("a", 0, 10, 5, 20), *runs("a", 1, 20, 5, 30), *runs("b", 0, 10, 5, 11)), Equality())
    ours = found.speedup("dspark")
    assert (ours.least, ours.median, ours.most) == pytest.approx((1.1, 1.5, 2.0))
    assert found.speed("plain").median == pytest.approx(10) and found.prefill("dspark").median == pytest.approx(0.3)
    said = again(found).sentences()
    assert "1.50 times as fast" in said[0] and "1.10 to 2.00" in said[0]
    assert (
        found.gain is None
        and "(0.25 to 0.50): this drafter costs more than it gains; no other was measured." in said[1]
        and "do not trust these speeds" in said[-1]
    )
    alone = [Run(one, repeat, "undrafted", 0.1, 1.0, 11) for one, repeat in (("a", 0), ("a", 1), ("b", 0))]
    aside = replace(found, runs=(*found.runs, *alone))  # at 10 tokens per second
    assert (aside.gain.least, aside.gain.median, aside.gain.most) == pytest.approx((1.1, 2.0, 3.0))
    said = again(aside).sentences()[1]
    assert "at 1.00 of generate's speed (0.50 to 1.00)" in said and "DSpark is 2.00 times as fast" in said
    slow = replace(found, runs=tuple(runs("a", 0, 10, 12, 8)))
    assert "here it loses" in slow.sentences()[0] and ": this drafter gains more than it costs;" in slow.sentences()[1]
    slow.draw()


def test_speed(subject):
    found = again(Speed.measure(subject, quietly))
    assert len(found.runs) == 2 * 3 * 4 and {run.prompt for run in found.runs} == {"maths-0", "chat-2"}
    firsts = [found.runs[start].way for start in range(0, 24, 4)]
    assert firsts == [
        "plain",
        "autoregressive",
        "dspark",
        "undrafted",
        "plain",
        "autoregressive",
    ]  # each begins in turn
    for run in found.runs:
        assert run.tokens == len(subject.plain(quietly)[int(run.prompt[-1])]) and run.prefill > 0 and run.decode > 0
    assert found.equality.answers == found.equality.identical == 24
