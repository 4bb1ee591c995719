"""The law that sampled tokens must have, by enumeration, and the test of counts against it."""

from __future__ import annotations

import math

import pytest
import torch


@pytest.fixture(scope="session")
def processors_of():
    """``processors_of(model, ids, **settings)``: the logits processors that transformers makes of these settings."""

    def work(model, ids, **settings):
        kept = []

        def keep(model, input_ids, logits_processor=None, **kwargs):
            kept.append(logits_processor)
            return input_ids

        model.generate(ids, custom_generate=keep, **settings)
        return kept[0]

    return work


@pytest.fixture(scope="session")
def law():
    """``law(model, ids, processors, depth)``: probability of every continuation of ``depth`` tokens, by enumeration."""

    def work(model, ids, processors, depth):
        vocabulary = model.config.vocab_size
        probabilities = {(): 1.0}
        for _ in range(depth):
            rows = torch.cat(
                [ids.expand(len(probabilities), -1), torch.tensor(list(probabilities), dtype=torch.long)], 1
            )
            with torch.no_grad():
                p = processors(rows, model(rows).logits[:, -1]).double().softmax(-1)
            probabilities = {
                (*prefix, token): mass * float(p[row, token])
                for row, (prefix, mass) in enumerate(probabilities.items())
                for token in range(vocabulary)
            }
        return probabilities

    return work


@pytest.fixture(scope="session")
def g_test():
    """``g_test(counts, probabilities, total)``: p-value of the counts; cells that expect less than 5 are pooled."""
    from scipy.stats import chi2

    def work(counts, probabilities, total):
        statistic, cells, pooled_seen, pooled_mass = 0.0, 0, 0, 0.0
        for outcome, mass in probabilities.items():
            seen = counts.get(outcome, 0)
            if mass == 0:
                assert seen == 0, f"{outcome} cannot occur and did"
            elif mass * total < 5:
                pooled_seen, pooled_mass = pooled_seen + seen, pooled_mass + mass
            else:
                cells += 1
                statistic += 2 * seen * math.log(seen / (mass * total)) if seen else 0.0
        if pooled_mass:
            cells += 1
            statistic += 2 * pooled_seen * math.log(pooled_seen / (pooled_mass * total)) if pooled_seen else 0.0
        return chi2.sf(statistic, cells - 1)

    return work
