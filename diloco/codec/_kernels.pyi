def encode(kind: int, values: int, records: int, blocks: int, keep: int, threads: int, /) -> bool: ...
def decode(kind: int, values: int, records: int, blocks: int, keep: int, threads: int, /) -> bool: ...
def step(
    anchor: int,
    momentum: int,
    residual: int,
    update: int,
    numel: int,
    first: int,
    kind: int,
    keep: int,
    lr: float,
    mu: float,
    pieces: int,
    count: int,
    threads: int,
    /,
) -> tuple[int, int]: ...
def digest(values: int, starts: int, runs: int, length: int, threads: int, /) -> int: ...
def largest(kind: int, payload: int, blocks: int, keep: int, threads: int, /) -> int: ...
def sound(kind: int, payload: int, blocks: int, keep: int, threads: int, /) -> bool: ...
