"""Low-communication training across islands: the algorithm, free of gRPC, disks and clocks."""
