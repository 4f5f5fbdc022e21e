"""The coordinator: collects contributions, takes outer steps, streams updates."""
