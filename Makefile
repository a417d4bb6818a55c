# Each target sets up what it needs in .venv first, once.
.PHONY: demo test check bench smoke soak stress fuzz wheel docs

demo: .venv/ready-demo  ## encode real photographs and draw their embeddings
	.venv/bin/mm-encoder demo

test: .venv/ready-dev
	.venv/bin/python -m pytest

check: .venv/ready-dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

smoke: .venv/ready-dev  ## check the installed package as an engine image would; ARGS="--checkpoint DIR --device cuda"
	.venv/bin/python -I -m pytest smoke $(ARGS)

docs: .venv/ready-dev  ## write docs/api.md from the docstrings
	.venv/bin/python scripts/make_api_docs.py

wheel: .venv/ready-dev  ## build dist/*.whl, and run smoke/ on it in a fresh environment
	scripts/wheel

soak: .venv/ready-dev  ## memory over 10,000 good, 10,000 bad and 2000 animated images
	SOAK=1 .venv/bin/python -m pytest tests/test_soak.py -s

fuzz: .venv/ready-dev  ## the cache's writers killed 200 times, the native kernels under sanitizers with 200,000 odd requests, files changed in 1500 ways
	FUZZ=1 .venv/bin/python -m pytest tests/cache tests/test_native.py tests/media/test_fuzz.py -k "kill or sanitizer or only_media_errors"

stress: .venv/ready-dev  ## the tests of threads, 50 times each, with threads switching every 10 microseconds
	.venv/bin/python -m pytest -m threads --repeat 50 --switch-interval 1e-5 -x
	STRESS=1 .venv/bin/python -m pytest tests/engine/test_interrupts.py tests/cache/test_interrupts.py -x

bench: .venv/ready-bench  ## print the tables; TABLE=preprocess or tower prints one
	.venv/bin/python -m benchmarks $(TABLE)

.venv/ready-%: pyproject.toml scripts/setup setup.py $(wildcard native/*.cpp native/*.h native/*.inc)
	scripts/setup $*
