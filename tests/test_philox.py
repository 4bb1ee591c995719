"""Philox against Random123's known answers and against a scalar loop written from the paper."""

from __future__ import annotations

import pytest
import torch

from dspark_fast.reference.philox import philox

FULL = 0xFFFFFFFF

# kat_vectors of Random123, philox4x32 with 10 rounds: counter, key, answer. The third takes the digits of pi.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL, FULL, FULL, FULL), (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def as_int64(value: int) -> torch.Tensor:
    return torch.tensor((value + 2**63) % 2**64 - 2**63)


def philox_loop(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(right >> 32) ^ c[1] ^ k[0], right & FULL, (left >> 32) ^ c[3] ^ k[1], left & FULL]
        k = [(k[0] + 0x9E3779B9) & FULL, (k[1] + 0xBB67AE85) & FULL]
    return tuple(c)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter, key, answer):
    words = philox(*(torch.tensor(c) for c in counter), as_int64(key[1] << 32 | key[0]))
    assert tuple(int(w) for w in words) == answer
    assert philox_loop(counter, key) == answer


@pytest.mark.parametrize(
    "shapes",
    [
        ((7,), (3, 1), (3, 1), (), (3, 1)),
        ((5,), (2, 3, 1), (2, 1, 1), (), (2, 1, 1)),
        ((1,), (4,), (1,), (4,), (4,)),
        ((), (), (), (), (6,)),
        ((0,), (2, 1), (2, 1), (), (2, 1)),
    ],
)
def test_broadcast_equals_a_loop(shapes):
    generator = torch.Generator().manual_seed(1)
    counters = [torch.randint(0, 2**32, s, generator=generator) for s in shapes[:4]]
    key = torch.randint(-(2**63), 2**63 - 1, shapes[4], generator=generator)
    before = [t.clone() for t in (*counters, key)]
    words = philox(*counters, key)
    assert all(torch.equal(a, b) for a, b in zip(before, (*counters, key), strict=True)), "inputs were written to"

    flat = [t.flatten().tolist() for t in torch.broadcast_tensors(*counters, key)]
    assert all(w.shape == torch.broadcast_shapes(*shapes) for w in words)
    for i, (c0, c1, c2, c3, k) in enumerate(zip(*flat, strict=True)):
        expected = philox_loop((c0, c1, c2, c3), (k & FULL, k >> 32 & FULL))
        assert tuple(int(w.flatten()[i]) for w in words) == expected


def test_only_the_low_word_of_a_counter_counts():
    one, big, key = torch.tensor(1), torch.tensor(1 + (5 << 32)), torch.tensor(9)
    for i in range(0, 4, 2):
        counters = [one] * 4
        counters[i] = big
        assert [int(w) for w in philox(*counters, key)] == [int(w) for w in philox(one, one, one, one, key)]
