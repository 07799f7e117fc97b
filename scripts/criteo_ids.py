"""The ids that Flambeau gives to the categories of Criteo's data."""

WORD = (1 << 64) - 1


def fnv1a(state, data):
    for byte in data:
        state = ((state ^ byte) * 0x100000001B3) & WORD
    return state


def category(field, text, buckets):
    """FNV-1a of the field's number and the text, mixed by MurmurHash3's finaliser."""
    state = fnv1a(0xCBF29CE484222325, field.to_bytes(8, "little"))
    bits = fnv1a(state, text.encode())
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        bits = ((bits ^ (bits >> 33)) * factor) & WORD
    return (bits ^ (bits >> 33)) % buckets
