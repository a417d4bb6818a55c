# Each target sets up what it needs in .venv first, once.
.PHONY: demo test check bench

demo: .venv/ready-demo  ## encode real photographs and draw their embeddings
	.venv/bin/mm-encoder demo

test: .venv/ready-dev
	.venv/bin/python -m pytest

check: .venv/ready-dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

bench: .venv/ready-bench  ## print the tables; TABLE=preprocess or tower prints one
	.venv/bin/python -m benchmarks $(TABLE)

.venv/ready-%: pyproject.toml scripts/setup
	scripts/setup $*
