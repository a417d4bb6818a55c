"""Towers compiled ahead of time from their Python definition, and run in one native call without the GIL.

    mm-encoder compile, or Encoder(tower="compiled")
        └─ build      runs `export` in a child process, which writes a package
    Encoder
        └─ choice     which tower an encoder runs, and why
             ├─ packages    finds the package that fits, and checks it before it is loaded
             └─ tower       tables and checks in Python, then one call of
                  └─ container    Torch's C interface of a loaded package

A package holds no weights: they stay the tensors of the Python tower, which also makes the tables.
"""
