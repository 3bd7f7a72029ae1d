"""Command line interface. Only this package imports click and rich."""

import click

from dpmac_cli.config.gone import instead


class Explained(click.Command):
    """A command that says what to type instead of options of other libraries or versions."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments; exit with a usage error for an option that has another name here."""
        ours = {name for parameter in self.params for name in parameter.opts}
        known = {name.removeprefix("--").replace("-", "_") for name in ours}
        for typed in (arg.partition("=")[0] for arg in args if arg.startswith("--")):
            if typed not in ours and (said := instead(typed[2:], known)):
                ctx.fail(f"No such option: {typed}.{said.replace('called ', 'called --')}")
        return super().parse_args(ctx, args)
