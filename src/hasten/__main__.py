"""``python -m hasten`` runs the program ``hasten``, and reports an interruption while its modules are being imported."""

import json
import sys


def main() -> int:
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
