"""The ``dkv`` command. Whatever a user gets wrong is answered in one line with exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for bad input, 130 when interrupted."""
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of a pipe left, as in `dkv info | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _main(argv: list[str]) -> int:
    try:
        from dkv.cli._app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("rich", "typer"):
            raise
        return _say(f'the command line needs {package}: pip install "dkv[demo]"', 2)
    from dkv.cli._common import CliError
    from dkv.models import MissingPackageError, ModelError

    try:
        code = app(args=argv, prog_name="dkv", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # typer turns the exception into this code
            return _say("interrupted", INTERRUPTED)
        return code if isinstance(code, int) else 0
    except (CliError, ModelError, MissingPackageError, NotImplementedError) as error:
        return _say(str(error), 2)
    except BrokenPipeError:
        raise
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of typer or click, whichever typer is built on
            return _say(error.format_message(), 2)
        if type(error).__name__ == "Abort":
            return _say("interrupted", INTERRUPTED)
        raise


def _say(message: str, code: int) -> int:
    print(f"dkv: {' '.join(message.split())}", file=sys.stderr)
    return code
