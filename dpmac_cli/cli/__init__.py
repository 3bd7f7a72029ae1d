"""Command line interface. Only this package imports typer and rich.

A command is a function in a module of this package, which checks what was typed, calls a function
of another package and prints its result. Results for programs (``--json``, tables, cards) go to
standard output; progress, notes and errors go to standard error. Exit codes are those of
:mod:`dpmac_cli.errors`.

- ``app`` lists the commands, and imports one when it is called.
- ``options`` makes options of fields with a type, limits and help, and messages of failures.
- ``console`` and ``display`` print: tables, notes, bars, and the events of a run.
- ``late`` has the modules that load torch, NumPy or pyarrow, for which help and messages about
  mistakes do not wait.
"""
