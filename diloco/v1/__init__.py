"""Messages generated from proto/diloco/v1 by `make proto`."""
