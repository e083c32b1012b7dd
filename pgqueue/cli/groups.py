"""A group of commands that answers an unknown one with the one that may be meant."""

from __future__ import annotations

import click


class Group(click.Group):
    """click's own group, with that answer."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            from pgqueue.cli.known_names import (
                did_you_mean,
            )  # imported here: a probe (`pgqueue health`) needs few modules

            ctx.fail(f"No such command {name!r}{did_you_mean(name, self.list_commands(ctx)) or '.'}")
        return super().resolve_command(ctx, args)
