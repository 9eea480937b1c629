"""The straight line from a call to a launch: what is planned, what is remembered, by which key.

The driver and the compiler are fakes, and CPU tensors take the way of those on a Hopper GPU.
"""

import math

import pytest
import torch
from dense_tools import FP8, check, make_operands
from fake_driver import MAP_D, MAPS_SFA, bindings, install_line

import deep_gemm
from deep_gemm import arguments, driver, gemm, layout, reference
from deep_gemm.config import settings
from deep_gemm.plan import CANDIDATES, make_config

M, N, K = 130, 264, 1040


@pytest.fixture
def line(monkeypatch):
    return install_line(monkeypatch, gemm)


def operands(m=M, n=N, k=K, seed=0):
    return make_operands(m, n, k, seed=seed, device="cpu")


def output(m=M, n=N):
    return torch.full((m, n), math.nan, dtype=torch.bfloat16)


def expected_addresses(a, b, d):
    return tuple(t.data_ptr() for t in (a[0], b[0], a[1], d, b[1]))


# Remembered launches


def test_a_call_that_repeats_is_looked_up(line):
    (a, b), d = operands(), output()
    for _ in range(3):
        deep_gemm.fp8_gemm_nt(a, b, d)
    assert len(line.planned) == len(line.loaded) == 1
    assert len(line.launched) == 3
    assert len({launched.args for launched in line.launched}) == 1
    assert line.addresses() == expected_addresses(a, b, d)
    (name, constants) = line.loaded[0]
    assert name == "fp8_gemm_1d2d"
    assert constants in [candidate.config.constants() for candidate in CANDIDATES]


def test_equal_views_are_the_same_call(line):
    (a, b), d = operands(), output()
    deep_gemm.fp8_gemm_nt(a, b, d)
    encoded = len(line.fake.encoded)
    deep_gemm.fp8_gemm_nt([a[0][:], a[1][:]], list(b), d.view(M, N))
    assert len(line.planned) == 1 and len(line.fake.encoded) == encoded
    assert line.fake.calls == []


@pytest.mark.parametrize("which", ["a", "sfa", "b", "sfb", "d", "all"])
def test_new_addresses_cost_no_plan_and_are_all_used(line, which):
    (a, b), d = operands(), output()
    deep_gemm.fp8_gemm_nt(a, b, d)
    (other_a, other_b), other_d = operands(seed=1), output()
    if which != "all":
        pick = {name: name == which for name in ("a", "sfa", "b", "sfb", "d")}
        other_a = other_a[0] if pick["a"] else a[0], other_a[1] if pick["sfa"] else a[1]
        other_b = other_b[0] if pick["b"] else b[0], other_b[1] if pick["sfb"] else b[1]
        other_d = other_d if pick["d"] else d
    encoded = len(line.fake.encoded)
    deep_gemm.fp8_gemm_nt(other_a, other_b, other_d)
    assert len(line.planned) == 1 and len(line.fake.encoded) == encoded
    assert line.addresses() == expected_addresses(other_a, other_b, other_d)
    deep_gemm.fp8_gemm_nt(a, b, d)  # and the first launch is what it was
    assert line.launched[-1].args == line.launched[0].args


def test_addresses_are_checked_also_where_a_template_is_known(line):
    (a, b), d = operands(), output()
    deep_gemm.fp8_gemm_nt(a, b, d)
    buffer = torch.zeros(a[0].untyped_storage().nbytes() + 16, dtype=torch.uint8)
    first = -buffer.data_ptr() % 16 + 8
    unaligned = buffer[first:].view(FP8).as_strided(a[0].shape, a[0].stride())
    assert unaligned.data_ptr() % 16 == 8
    with pytest.raises(ValueError, match="a starts at address"):
        deep_gemm.fp8_gemm_nt((unaligned, a[1]), b, d)
    assert len(line.launched) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda: deep_gemm.set_num_sms(7),
        lambda: deep_gemm.set_pdl(True),
        lambda: deep_gemm.set_backend("sm90"),
    ],
    ids=["num_sms", "pdl", "backend"],
)
def test_a_new_setting_means_a_new_plan(line, change):
    (a, b), d = operands(), output()
    deep_gemm.fp8_gemm_nt(a, b, d)
    change()
    for _ in range(2):
        deep_gemm.fp8_gemm_nt(a, b, d)
    assert len(line.planned) == 2
    assert line.launched[-1].pdl is settings.pdl
    assert line.launched[-1].grid <= (settings.num_sms or 132)


def test_settings_that_change_no_launch_cost_nothing(line):
    (a, b), d = operands(), output()
    deep_gemm.fp8_gemm_nt(a, b, d)
    deep_gemm.set_tc_util(50)
    deep_gemm.set_mk_alignment_for_contiguous_layout(64)
    deep_gemm.set_num_sms(0)  # as it was
    deep_gemm.fp8_gemm_nt(a, b, d)
    assert len(line.planned) == 1 and len(gemm._launches) == 1


def test_more_sms_than_there_are_do_no_harm(line):
    settings.num_sms = 1000  # as set before CUDA was in use
    (a, b), d = operands(2000, 2112, 256), output(2000, 2112)
    deep_gemm.fp8_gemm_nt(a, b, d)
    assert line.launched[0].grid <= 132


@pytest.mark.parametrize("m, n, k", [(M + 1, N, K), (M, N + 8, K), (M, N, K + 16)])
def test_another_size_is_another_plan(line, m, n, k):
    for sizes in ((M, N, K), (m, n, k), (M, N, K)):
        (a, b), d = operands(*sizes), output(*sizes[:2])
        deep_gemm.fp8_gemm_nt(a, b, d)
    assert len(line.planned) == 2
    args = [line.args(i) for i in range(3)]
    shapes = [(each.shape_m, each.shape_n, each.shape_k) for each in args]
    assert shapes == [(M, N, K), (m, n, k), (M, N, K)]


def test_another_stride_is_another_plan(line):
    (a, b), d = operands(), torch.empty(M, N + 8, dtype=torch.bfloat16)[:, :N]
    deep_gemm.fp8_gemm_nt(a, b, d)
    deep_gemm.fp8_gemm_nt(a, b, output())
    deep_gemm.fp8_gemm_nt((a[0].contiguous(), a[1]), b, output())
    assert len(line.planned) == 3
    strides = [
        [line.fake.maps_of(launched)[i].stride_bytes for i in (0, MAP_D)]
        for launched in line.launched
    ]
    assert strides == [[K + 32, 2 * N + 16], [K + 32, 2 * N], [K, 2 * N]]


def test_options_are_part_of_the_key(line):
    (a, b), d = operands(), output()
    deep_gemm.fp8_gemm_nt(a, b, d)
    deep_gemm.fp8_gemm_nt(a, b, d, recipe=(1, 128, 128), compiled_dims="mnk")
    for wrong in (
        {"recipe": (1, 1, 128)},
        {"recipe_a": (1, 128)},
        {"compiled_dims": "xyz"},
        {"c": d},
    ):
        with pytest.raises((ValueError, NotImplementedError)):
            deep_gemm.fp8_gemm_nt(a, b, d, **wrong)
    assert len(line.launched) == 2


def test_lists_and_nonsense_are_refused_by_the_checks(line):
    (a, b), d = operands(), output()
    deep_gemm.fp8_gemm_nt(a, b, d, recipe=[1, 128, 128])
    assert len(line.launched) == 1
    for wrong in ((a[0], b, d), (a, (b[0],), d), (a, b, None), ((None, None), b, d)):
        with pytest.raises(TypeError):
            deep_gemm.fp8_gemm_nt(*wrong)


def test_the_memory_is_bounded(line, monkeypatch):
    monkeypatch.setattr(arguments, "MAX_ENTRIES", 4)
    kept = [(operands(m), output(m)) for m in range(1, 11)]
    for (a, b), d in kept:
        deep_gemm.fp8_gemm_nt(a, b, d)
        assert len(gemm._launches) <= 4 and len(gemm._templates) <= 4
    assert [line.args(i).shape_m for i in range(10)] == list(range(1, 11))


def test_a_launch_that_fails_is_not_remembered(line):
    (a, b), d = operands(), output()
    line.fake.launch_status = bindings.CUresult.CUDA_ERROR_INVALID_VALUE
    for _ in range(2):
        with pytest.raises(driver.DriverError):
            deep_gemm.fp8_gemm_nt(a, b, d)
    assert not gemm._launches
    line.fake.launch_status = bindings.CUresult.CUDA_SUCCESS
    deep_gemm.fp8_gemm_nt(a, b, d)
    assert len(line.launched) == 1


# Scales of A


def test_transposed_scales_are_never_remembered(line, monkeypatch):
    copies = []
    native_sfa = layout.native_sfa
    monkeypatch.setattr(
        layout, "native_sfa", lambda *rest: copies.append(native_sfa(*rest)) or copies[-1]
    )
    ((a, sfa), b), d = operands(), output()
    row_major = sfa.contiguous()
    for i in range(3):
        row_major += 1  # contents may change between calls
        deep_gemm.fp8_gemm_nt((a, row_major), b, d)
        assert line.addresses()[2] == copies[i].data_ptr()
        assert torch.equal(copies[i], row_major)
    assert len({copy.data_ptr() for copy in copies}) == 3
    assert not gemm._launches
    assert len(line.planned) == 1
    assert line.fake.maps_of(line.launched[0])[MAPS_SFA[0]].stride_bytes == 4 * 132


def test_native_and_row_major_scales_have_templates_of_their_own(line):
    ((a, sfa), b), d = operands(), output()
    for scales in (sfa, sfa.contiguous(), sfa, sfa.contiguous()):
        deep_gemm.fp8_gemm_nt((a, scales), b, d)
    maps = [line.fake.maps_of(launched) for launched in line.launched]
    strides = [each[MAPS_SFA[0]].stride_bytes for each in maps]
    assert strides == [4 * sfa.stride(1), 4 * 132] * 2
    assert line.addresses(0)[2] == line.addresses(2)[2] == sfa.data_ptr()


def test_scales_at_an_unaligned_address_are_copied(line):
    ((a, sfa), b), d = operands(128), output(128)
    deep_gemm.fp8_gemm_nt((a, sfa), b, d)
    buffer = torch.empty(sfa.stride(1) * 9 + 8)
    first = -buffer.data_ptr() // 4 % 4 + 1
    unaligned = buffer[first:].as_strided(sfa.shape, sfa.stride())
    assert unaligned.data_ptr() % 16
    unaligned.copy_(sfa)
    deep_gemm.fp8_gemm_nt((a, unaligned), b, d)
    assert line.addresses()[2] % 16 == 0 and len(gemm._launches) == 1


# Forms, empty problems, backends


def test_the_transposed_forms_launch_the_same(line):
    (a, b), d = operands(), output()
    at, bt = ([t.t() for t in pair] for pair in (a, b))
    deep_gemm.fp8_gemm_nt(a, b, d)
    deep_gemm.fp8_gemm_nn(a, bt, d)
    deep_gemm.fp8_gemm_tn(at, bt, d, compiled_dims="nk")
    deep_gemm.fp8_gemm_tt(at, b, d, compiled_dims="nk")
    assert len({launched.args for launched in line.launched}) == 1 and len(line.launched) == 4
    assert len(line.planned) == 1


@pytest.mark.parametrize("m, n, k", [(0, N, K), (M, 0, K), (M, N, 0)])
def test_empty_problems_launch_nothing(line, m, n, k):
    a = torch.empty(m, k).to(FP8), torch.empty(m, -(-k // 128))
    b = torch.empty(n, k).to(FP8), torch.empty(-(-n // 128), -(-k // 128))
    for _ in range(2):
        d = output(m, n)
        deep_gemm.fp8_gemm_nt(a, b, d)
        assert not d.any()  # zeros, or nothing at all
    assert not line.launched and not line.planned and not gemm._launches


def test_the_reference_backend_takes_over_at_once(line):
    (a, b), d = operands(), output()
    deep_gemm.fp8_gemm_nt(a, b, d)
    deep_gemm.set_backend("reference")
    deep_gemm.fp8_gemm_nt(a, b, d)
    assert len(line.launched) == 1
    expected = output()
    reference.gemm_nt(*a, *b, expected)
    assert torch.equal(d, expected)


def test_plans_are_printed_when_asked_for(line, monkeypatch, capsys):
    monkeypatch.setenv("DG_PRINT_CONFIGS", "1")
    (a, b), d = operands(), output()
    for _ in range(2):
        deep_gemm.fp8_gemm_nt(a, b, d)
    printed = capsys.readouterr().out
    assert printed.count("Problem(") == printed.count("KernelConfig(") == 1
    assert f"m={M}, n={N}, k={K}" in printed


def test_an_explicit_config_is_not_remembered(line):
    (a, b), d = operands(), output()
    config = make_config(128, 96, 2, cluster_m=2)
    deep_gemm.fp8_gemm_nt(a, b, d)
    gemm.run_dense(a, b, d, config)
    deep_gemm.fp8_gemm_nt(a, b, d)
    assert line.loaded[-1] == ("fp8_gemm_1d2d", config.constants())
    assert line.launched[1].cluster == 2
    assert line.launched[0].args == line.launched[2].args != line.launched[1].args
    assert line.launched[1].smem_bytes == config.smem_bytes


@pytest.mark.parametrize("fill", ["normal", "exponents", "zeros", "outliers", "tiny", "integers"])
def test_the_reference_backend_passes_the_oracle_of_the_gpu_tests(fill):
    for m, n, k in ((1, 8, 16), (200, 392, 1040)):
        operands = make_operands(m, n, k, fill, device="cpu")
        d = check(operands)
        if fill == "integers":
            assert torch.equal(d, operands.oracle().bfloat16())


def test_the_oracle_of_the_gpu_tests_notices_what_it_should():
    operands = make_operands(200, 392, 1040, device="cpu")

    def with_damage(damage):
        def run(a, b, d):
            reference.gemm_nt(*a, *b, d)
            damage(d)

        with pytest.raises(AssertionError) as caught:
            check(operands, run)
        return str(caught.value)

    outside = "outside of D were written"
    assert outside in with_damage(
        lambda d: d.as_strided((1,), (1,), d.storage_offset() - 1).zero_()
    )
    below = 200 * (392 + 24)
    assert outside in with_damage(
        lambda d: d.as_strided((1,), (1,), d.storage_offset() + below).zero_()
    )
    assert "NaN" in with_damage(lambda d: d[199, 391:].fill_(math.nan))
    assert "row 7" in with_damage(lambda d: d[7].mul_(1.02))
    assert "row" in with_damage(lambda d: d[128:].copy_(d[127:199].clone()))
