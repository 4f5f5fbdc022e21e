"""The `diloco` command, and `python -m diloco`."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point: runs `diloco.cli`; a Ctrl-C while that is being imported ends as it does later."""
    try:
        from diloco.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
