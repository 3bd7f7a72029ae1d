"""A silo of a federation: private steps on records that stay where they are.

:class:`.silo.Silo` takes a few steps per round on the weights that a server sends, and returns
noisy weights with a claim of public facts. :func:`.claims.federation` says what the claims of all
silos mean together. The modules ``flower`` and ``nvflare`` connect a silo to these frameworks, and
are imported by whoever uses them.

Out of scope: how a server averages weights, how they travel, and who may ask for a round.
"""
