"""What would stop an island, found in a minute before any training: `diloco preflight island.toml`.

Each check looks at one thing, within a bound in time, and says what it found and what to do: `finding`. What is looked
at: the way to the coordinator (`network`), the run (`agreement`), and this machine (`machine`, `memory`).
"""
