"""``python -m dpmac_cli`` is ``dpmac``."""

from dpmac_cli.cli.app import main

main()
