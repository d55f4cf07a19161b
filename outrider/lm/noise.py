"""`speculative.noise.raw_bits` in torch: the same integers, for noise that is drawn where the logits are.

Philox4x64-10 (Salmon et al., SC 2011) in int64, which wraps as unsigned words do; only the high half of a
product and the shift of a word need care with signs. Knows nothing about models.
"""

import torch

from speculative.noise import DOMAIN

_M0, _M1 = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_W0, _W1 = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_ROUNDS = 10
_MASK = (1 << 64) - 1
_LOW = (1 << 32) - 1


def raw_bits(
    seed: int, position: int, vocabulary_size: int, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """The 64 bits of each id at ``position``: int64[vocabulary_size], bit for bit those of
    `speculative.noise`."""
    blocks = torch.arange(-(-vocabulary_size // 4), dtype=torch.int64, device=device)
    zeros = torch.zeros_like(blocks)
    words = (blocks, torch.full_like(blocks, _signed(position)), zeros, zeros)
    key0, key1 = seed, DOMAIN
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(words[0], _M0)
        high1, low1 = _multiply(words[2], _M1)
        words = (high1 ^ words[1] ^ _signed(key0), low1, high0 ^ words[3] ^ _signed(key1), low0)
        key0, key1 = (key0 + _W0) & _MASK, (key1 + _W1) & _MASK
    return torch.stack(words, dim=1).reshape(-1)[:vocabulary_size]


def _multiply(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low half of the 128-bit product of unsigned words, by halves of 32 bits."""
    high, low = _upper(word), word & _LOW
    factor_high, factor_low = factor >> 32, factor & _LOW
    lowest = low * factor_low
    middle = high * factor_low + _upper(lowest)
    cross = low * factor_high + (middle & _LOW)
    return high * factor_high + _upper(middle) + _upper(cross), word * _signed(factor)


def _upper(word: torch.Tensor) -> torch.Tensor:
    """The upper 32 bits of an unsigned word; a plain shift would drag the sign along."""
    return (word >> 32) & _LOW


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned word."""
    return word - (1 << 64) if word >> 63 else word
