"""``python -m hasten`` is ``hasten``. Who stops it while it is still being loaded gets an answer, too."""

import json
import sys


def main() -> int:
    try:
        from hasten.cli.main import main as program

        return program()
    except KeyboardInterrupt:
        print("hasten: stopped", file=sys.stderr)
        if "--json" in sys.argv[1:]:
            print(json.dumps({"error": "stopped"}))
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
