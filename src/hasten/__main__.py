"""Entry point of ``hasten`` and ``python -m hasten``; handles Ctrl-C while the program is still being imported."""

import json
import sys


def main() -> int:
    """Runs the command line; returns its exit code."""
    try:
        from hasten.cli.main import main as program

        return program()
    except KeyboardInterrupt:
        print("hasten: interrupted", file=sys.stderr)
        if "--json" in sys.argv[1:]:
            print(json.dumps({"error": "interrupted"}))
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
