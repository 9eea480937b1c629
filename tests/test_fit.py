"""The cost model against the measured table that it was fitted to."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import fit
from benchmarks.results import geomean
from deep_gemm.plan import CANDIDATES, COST_MODEL, Candidate, CostModel, predicted_us


@pytest.fixture(scope="module")
def samples() -> list[fit.Sample]:
    return fit.load()


def test_the_table_has_every_shape_and_every_candidate(samples: list[fit.Sample]) -> None:
    assert len(samples) == 72
    tried = {config for sample in samples for config in sample.us}
    assert tried >= {candidate.config for candidate in CANDIDATES}


def test_the_choice_is_near_the_best_of_all_configs(samples: list[fit.Sample]) -> None:
    found = fit.regrets(samples, COST_MODEL, CANDIDATES)
    assert geomean(found) < 1.01
    assert max(found) < 1.08


def test_a_model_without_the_traffic_term_chooses_worse(samples: list[fit.Sample]) -> None:
    """The measure of the test above can fail."""
    blind = CostModel(COST_MODEL.launch_us, 0.0, 1e12, 1e12)
    assert max(fit.regrets(samples, blind, CANDIDATES)) > 1.08


def test_predictions_of_the_choice_are_times(samples: list[fit.Sample]) -> None:
    for sample in samples:
        tried = [each for each in CANDIDATES if each.config in sample.us]
        chosen = min(tried, key=lambda each: predicted_us(sample.problem, each, fit.NUM_SMS))
        ratio = predicted_us(sample.problem, chosen, fit.NUM_SMS) / sample.us[chosen.config]
        assert 0.85 < ratio < 1.15, (sample.problem, chosen.config, ratio)


@pytest.mark.parametrize("held_out", range(9))
def test_a_weight_shape_that_was_not_fitted_is_served_well(
    samples: list[fit.Sample], held_out: int
) -> None:
    """Numbers start from guesses, not from the fitted ones."""
    weights = sorted({(each.problem.n, each.problem.k) for each in samples})
    outside = [e for e in samples if (e.problem.n, e.problem.k) == weights[held_out]]
    inside = [each for each in samples if each not in outside]
    guesses = [
        Candidate(each.config, each.config.block_m * each.config.block_n / 4.5e4 + 0.05, 0.5)
        for each in CANDIDATES
    ]
    found = fit.regrets(outside, *fit.refit(inside, guesses, steps=15_000))
    assert statistics.median(found) <= 1.05
    assert max(found) <= 1.15
