"""The compile check can fail: each rule on a kernel that breaks it, and on none that does not."""

from __future__ import annotations

import pytest

NONE: set[str] = set()


@pytest.fixture(scope="module")
def broken(compiled):
    """``broken(kernel, target)``: the rules, by their first word, that it breaks."""
    result = compiled("--calls", "bad_kernels")
    assert result["status"] == 1

    def rules(kernel, target):
        assert any((row["kernel"], row["target"]) == (f"bad_kernels.{kernel}", target) for row in result["rows"])
        return {
            row["problem"].partition(":")[0]
            for row in result["problems"]
            if (row["kernel"], row["target"]) == (f"bad_kernels.{kernel}", target)
        }

    return rules


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("_wide_kernel", NONE),
        ("_strided_kernel", {"narrow loads"}),
        ("_absent_kernel", {"wide loads", "matrix"}),
        ("_spilling_kernel", {"spills"}),
        ("_shared_kernel", {"shared memory"}),
        ("_guarded_kernel", NONE),
        ("_unguarded_kernel", {"barrier"}),
        ("_unknown_kernel", {"atomics"}),
        ("_broken_kernel", {"does not compile"}),
    ],
)
def test_each_rule(kernel, expected, target, broken):
    assert broken(kernel, target) == expected


@pytest.mark.slow
def test_a_pointer_that_is_not_aligned(broken):
    assert broken("_narrow_kernel", "sm_90") == {"narrow loads"}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "expected"), [("gfx942", {"matrix"}), ("sm_75", NONE)])
def test_scalar_products(target, expected, broken):
    """On sm_75, where Triton knows no others, kernels only have to compile."""
    assert broken("_scalar_kernel", target) == expected


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_launcher_that_raises(target, compiled):
    """As one does that hands an option of one maker's GPUs to another's."""
    (row,) = [
        row
        for row in compiled("--calls", "bad_kernels")["problems"]
        if row["target"] == target and row["dtype"] == "bfloat16" and row["kernel"].startswith("launcher")
    ]
    assert row["problem"].startswith("raises: KeyError") and "no_such_option" in row["problem"]
