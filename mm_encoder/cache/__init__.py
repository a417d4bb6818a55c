"""Results kept: a key that covers the weights, a tier in memory, a tier on disk, and one flight a key."""
