"""The demo, reports and checkpoints: the room that sees coordinator and islands together."""
