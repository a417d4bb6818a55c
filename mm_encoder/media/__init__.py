"""From whatever a caller gives to uint8 pixels and patches. Knows no model family."""
