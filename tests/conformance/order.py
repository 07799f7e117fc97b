"""The order of the samples, as the comment of Split in coordinator.proto describes it."""

import struct

MASK = 0xFFFFFFFF


def _quarter(state, a, b, c, d):
    for first, second, third, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        state[first] = (state[first] + state[second]) & MASK
        mixed = state[third] ^ state[first]
        state[third] = ((mixed << bits) | (mixed >> (32 - bits))) & MASK


def words(key):
    """Yields the stream of ChaCha8 under a key of 32 bytes, as numbers of 32 bits."""
    constants = struct.unpack("<4I", b"expand 32-byte k")
    counter = 0
    while True:
        begin = [*constants, *struct.unpack("<8I", key), counter & MASK, counter >> 32, 0, 0]
        state = list(begin)
        for _ in range(4):
            for column in range(4):
                _quarter(state, column, 4 + column, 8 + column, 12 + column)
            for column in range(4):
                diagonal = (column, 4 + (column + 1) % 4, 8 + (column + 2) % 4, 12 + (column + 3) % 4)
                _quarter(state, *diagonal)
        yield from ((word + first) & MASK for word, first in zip(state, begin))
        counter += 1


def below(stream, count):
    """Returns a number below `count`, drawn as Rust's rand 0.9 does (Canon's method with 32 bits)."""
    product = next(stream) * count
    result, low = product >> 32, product & MASK
    if low > (1 << 32) - count:
        result += (low + (next(stream) * count >> 32)) >> 32
    return result


def permutation(seed, data_epoch, purpose, samples):
    """Returns 0..samples, shuffled. `purpose` is 0 for a pass over the data, 1 for the held-out samples."""
    stream = words(struct.pack("<QIB19x", seed, data_epoch, purpose))
    order = list(range(samples))
    for last in range(samples - 1, 0, -1):
        other = below(stream, last + 1)
        order[last], order[other] = order[other], order[last]
    return order


def order(seed, data_epoch, samples):
    """Returns sample numbers in the order of a pass over the data."""
    return permutation(seed, data_epoch, 0, samples)
