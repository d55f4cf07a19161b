"""The leads of `speculative.noise` in torch: the same integers, drawn where the logits are.

Philox4x64-10 (Salmon et al., SC 2011) in int64, which wraps as unsigned words do; only the high half of a
product and the shift of a word need care with signs. Every operation has a fixed shape and reads nothing on
the host, so a CUDA graph can capture it.
"""

import torch

from speculative.noise import DOMAIN

MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
"""Philox4x64's two factors, and what a round adds to its two keys."""
_ROUNDS = 10
_LOW = (1 << 32) - 1
IDS = 16
"""Number of ids whose leads one block of Philox gives."""


def leads(seeds: torch.Tensor, positions: torch.Tensor, vocabulary_size: int) -> torch.Tensor:
    """The leading 16 bits of each id's noise: int64 ``[n, vocabulary_size]``.

    ``seeds`` and ``positions`` are int64 ``[n]``; a seed is the int64 with the bits of the unsigned word.
    """
    blocks = torch.arange(-(-vocabulary_size // IDS), device=seeds.device).expand(len(seeds), -1)
    words = _blocks(seeds, positions, blocks)
    parts = [(words >> shift) & 0xFFFF for shift in range(0, 64, 16)]
    return torch.stack(parts, dim=3).flatten(1).narrow(1, 0, vocabulary_size)


def leads_of(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The leading 16 bits of the noise of some ids: int64 ``[n, k]`` for ids ``[n, k]``; see `leads`."""
    words = _blocks(seeds, positions, ids // IDS)
    words = words.gather(2, (ids % IDS // 4).unsqueeze(2)).squeeze(2)
    return (words >> (16 * (ids % 4))) & 0xFFFF


def _blocks(seeds: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The four words of each block: int64 ``[n, k, 4]`` for blocks ``[n, k]``."""
    a, b = blocks, positions.unsqueeze(1).expand_as(blocks)
    c = d = torch.zeros_like(blocks)
    one = seeds.unsqueeze(1)
    other = torch.full_like(one, signed(DOMAIN))
    for _ in range(_ROUNDS):
        high_a, low_a = _multiply(a, MULTIPLIERS[0])
        high_c, low_c = _multiply(c, MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ one, low_c, high_a ^ d ^ other, low_a
        one, other = one + signed(KEY_STEPS[0]), other + signed(KEY_STEPS[1])
    return torch.stack((a, b, c, d), dim=2)


def signed(word: int) -> int:
    """The int64 with the bits of an unsigned word."""
    return word - (1 << 64) if word >> 63 else word


def _multiply(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low half of the 128-bit product of unsigned words, by halves of 32 bits."""
    high, low = _upper(word), word & _LOW
    factor_high, factor_low = factor >> 32, factor & _LOW
    lowest = low * factor_low
    middle = high * factor_low + _upper(lowest)
    cross = low * factor_high + (middle & _LOW)
    return high * factor_high + _upper(middle) + _upper(cross), word * signed(factor)


def _upper(word: torch.Tensor) -> torch.Tensor:
    """The upper 32 bits of an unsigned word; a plain shift would drag the sign along."""
    return (word >> 32) & _LOW
