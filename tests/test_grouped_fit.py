"""The cost model of the grouped kernels, against the committed table."""

import statistics

import pytest

from benchmarks import grouped_fit
from deep_gemm.grouped_cost import GROUPED_CANDIDATES, expected_tiles
from deep_gemm.types import Problem


@pytest.fixture(scope="module")
def samples():
    return grouped_fit.load()


def test_the_choice_is_near_the_fastest(samples):
    found = grouped_fit.regrets(samples)
    assert len(found) == 25
    assert statistics.median(found) <= 1.05 and max(found) <= 1.15


def test_every_candidate_was_timed_and_is_chosen_somewhere(samples):
    configs = {each.config for each in GROUPED_CANDIDATES}
    assert all(configs & sample.us.keys() for sample in samples)
    best = {min(configs & each.us.keys(), key=each.us.__getitem__) for each in samples}
    assert len(best) >= 4


def test_a_refit_does_not_choose_worse(samples):
    model, candidates = grouped_fit.refit(samples, steps=30)
    assert statistics.fmean(grouped_fit.regrets(samples, model, candidates)) < 1.03


def test_tiles_by_the_warpgroups_that_have_rows():
    problem = Problem("masked", 4096, 256, 128, "cuda:0", 128, 128, 256, (1, 1), 1, 300)
    tall = next(each.config for each in GROUPED_CANDIDATES if each.config.block_m == 192)
    assert expected_tiles(problem, tall) == {3: 2, 2: 2}  # 192 + 108 rows, two tiles along n
