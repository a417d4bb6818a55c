"""The result cache: keys, a memory tier, disk tiers, and request coalescing per key."""
