"""``python -m hasten`` is ``hasten``."""

from hasten.cli.main import main

raise SystemExit(main())
