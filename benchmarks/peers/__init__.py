"""The same tensors, averaged between two sites by this system and by others."""
