"""python -m benchmarks [TABLE...]: print the named tables, by default all."""

from __future__ import annotations

import importlib
import sys

TABLES = ("preprocess", "plan", "tower", "busy_host", "overhead", "batching", "cache", "imports")


def main() -> int:
    wanted = sys.argv[1:] or list(TABLES)
    unknown = [name for name in wanted if name not in TABLES]
    if unknown:
        print(f"no table {', '.join(unknown)}; use {', '.join(TABLES)}", file=sys.stderr)
        return 2
    for name in wanted:
        importlib.import_module(f"benchmarks.{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
