"""The ``dkv`` command. Whatever a user gets wrong is answered in one line with exit code 2."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["main"]

FAILED, REFUSED, INTERRUPTED, TERMINATED = 1, 2, 130, 143


class _Terminated(BaseException):
    """SIGTERM came."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 when all went well; 1 when what was asked for failed, as when the demo's compressed cache forgot, or nobody read
    the output; 2 for bad input or something missing; 130 when interrupted (ctrl-C), 143 when terminated (SIGTERM).
    """
    try:
        with _terminable():
            return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except _Terminated:
        return _say("terminated", TERMINATED)
    except BrokenPipeError:  # the reader of a pipe left, as in `dkv info | head -1`
        _drop_output()
        return FAILED


def _main(argv: list[str]) -> int:
    try:
        from dkv.cli._app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("rich", "typer"):
            raise
        return _say(f'the command line needs {package}: pip install "dkv[demo]"', REFUSED)
    from dkv.benches.results import command_line
    from dkv.cli._common import CliError
    from dkv.models import MissingPackageError, ModelError

    token = command_line.set(argv)
    try:
        code = app(args=argv, prog_name="dkv", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # typer turns the exception into this code
            return _say("interrupted", INTERRUPTED)
        return code if isinstance(code, int) else 0
    except CliError as error:
        return _say(str(error), error.code)
    except (ModelError, MissingPackageError, NotImplementedError) as error:
        return _say(str(error), REFUSED)
    except BrokenPipeError:
        raise
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of typer or click, whichever typer is built on
            return _say(error.format_message(), REFUSED)
        if type(error).__name__ == "Abort":
            return _say("interrupted", INTERRUPTED)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _drop_output()
            return _say(f"cannot write the output: {error.strerror}", FAILED)
        raise
    finally:
        command_line.reset(token)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends a command as ctrl-C does: what was begun is cleaned up."""
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return

    def terminate(number: int, frame: Any) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _drop_output() -> None:
    """What is left in the buffer of stdout goes nowhere, so that the end of the process does not try again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(message: str, code: int) -> int:
    print(f"dkv: {' '.join(message.split())}", file=sys.stderr)
    return code
