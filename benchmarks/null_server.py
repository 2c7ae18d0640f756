"""The null server under its old name: `python -m benchmarks.null_server` is `python -m engine.null_server`."""
from __future__ import annotations

import sys

from engine.null_server import main

if __name__ == "__main__":
    sys.exit(main())
