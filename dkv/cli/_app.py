"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from dkv._version import __version__
from dkv.cli import FAILED, INTERRUPTED, REFUSED, TERMINATED, bench, demo, fidelity, generate, info, profile, recall
from dkv.cli._common import out

ENDING = f"""\b
Exit codes:
  0    all went well
  {FAILED}    what was asked for failed: a compressed cache forgot (dkv demo), or the output could not be written
  {REFUSED}    bad input, or something is missing: a package, a model, a file, a device
  {INTERRUPTED}  interrupted (ctrl-C); no file is left half written
  {TERMINATED}  terminated (SIGTERM); likewise

\b
Examples:
  dkv demo
  dkv info
  dkv recall --help
  dkv --install-completion
"""

app = typer.Typer(
    name="dkv",
    help="A compressed KV cache for long contexts.",
    epilog=ENDING,
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


app.command("demo", short_help="Passcode in a long text: dense beside DKV.", epilog=demo.EXAMPLES)(demo.demo)
app.command("generate", short_help="Continue a text, streaming.", epilog=generate.EXAMPLES)(generate.generate)
app.command("profile", short_help="Measure what each kv head needs stored.", epilog=profile.EXAMPLES)(profile.profile)
app.command("recall", short_help="How often a passcode survives compression.", epilog=recall.EXAMPLES)(recall.recall)
app.command("fidelity", short_help="Distance from the dense cache, beside peers.", epilog=fidelity.EXAMPLES)(
    fidelity.fidelity
)
app.command("info", short_help="Versions, and which backends run here.", epilog=info.EXAMPLES)(info.info)
app.add_typer(bench.app, name="bench")
