"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from dkv._version import __version__
from dkv.cli import bench, demo, fidelity, generate, info, profile, recall
from dkv.cli._common import out

app = typer.Typer(
    name="dkv",
    help="A compressed KV cache for long contexts.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        out.print(f"dkv {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        out.print(context.get_help())
        raise typer.Exit()


app.command("demo")(demo.demo)
app.command("generate")(generate.generate)
app.command("profile")(profile.profile)
app.command("recall")(recall.recall)
app.command("fidelity")(fidelity.fidelity)
app.command("info")(info.info)
app.add_typer(bench.app, name="bench")
