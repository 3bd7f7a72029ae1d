"""Studies: many runs on the same records, to compare settings or to search for the best ones.

- ``grid`` makes runs of settings with several values, and names their folders.
- ``local`` and ``ray_cluster`` train them, each by a command ``dpmac train``.
- ``results`` reads their reports and tests differences; ``written`` makes tables and figures.
- ``search`` and ``tune`` are private selection: a secret number of trials in this process, of which
  only the best is published.

A comparison shows all of its runs, so their epsilons add up. A search costs much less, and shows
one run.
"""
