"""Image inputs to uint8 pixels and patches. Independent of the model families."""
