"""`python -m mm_encoder`: the command `mm-encoder`, for environments without its script."""

from .cli import main

if __name__ == "__main__":
    main()
