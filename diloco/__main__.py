"""`python -m diloco`: the same as the `diloco` command."""

from diloco.cli import main

main()
