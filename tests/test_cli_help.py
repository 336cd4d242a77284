"""What the command line says of itself: help with examples that parse, exit codes, completion, docs/command-line.md."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
import typer.main

from dkv import cli
from dkv.cli import main
from dkv.cli._app import app

ROOT = Path(__file__).resolve().parent.parent
DOCS = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
COMMANDS = [[name] for name in ("demo", "generate", "profile", "recall", "fidelity", "info")]
COMMANDS += [["bench", name] for name in ("memory", "decode", "prefill", "mlx")]


def parsed(arguments):
    """The command that the arguments name, and its options, read but not run."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command, arguments = command.commands[arguments[0]], arguments[1:]
    return command, command.make_context("dkv", list(arguments)).params


def examples(text):
    return [shlex.split(line)[1:] for line in re.findall(r"^ *(dkv .+)$", text, flags=re.MULTILINE)]


def test_every_command_is_tried_here():
    top = typer.main.get_command(app).commands
    names = [[name] for name in top if name != "bench"] + [["bench", name] for name in top["bench"].commands]
    assert sorted(names) == sorted(COMMANDS)


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_help_has_examples_that_parse(arguments, capsys):
    assert main([*arguments, "--help"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("Usage: dkv") and printed.err == ""
    found = examples(printed.out.split("Examples:")[1])
    assert found and found[0][: len(arguments)] == arguments
    for example in found:
        parsed(example)
    command, _ = parsed([*arguments, *(["x", "-o", "x"] if arguments == ["profile"] else [])])
    assert "--json" in {flag for option in command.params for flag in option.opts}


@pytest.mark.parametrize("arguments", [[], ["--help"], ["bench"], ["bench", "--help"]], ids=" ".join)
def test_help_lists_the_commands(arguments, capsys):
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("Usage: dkv") and printed.err == ""
    assert "..." not in printed.out.replace("[ARGS]...", "")  # nothing is cut off
    for name in [command[-1] for command in COMMANDS if (len(command) == 2) == (arguments[:1] == ["bench"])]:
        assert re.search(rf"^  {name} +\w", printed.out, flags=re.MULTILINE)


def test_exit_codes_are_told_in_help_and_docs(capsys):
    codes = [0, cli.FAILED, cli.REFUSED, cli.INTERRUPTED, cli.TERMINATED]
    assert main(["--help"]) == 0
    told = capsys.readouterr().out.split("Exit codes:")[1].split("Examples:")[0]
    assert [int(code) for code in re.findall(r"^ +(\d+)  ", told, flags=re.MULTILINE)] == codes
    table = DOCS.split("## Exit codes")[1].split("\n## ")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", table, flags=re.MULTILINE)] == codes


def test_the_docs_know_every_command_and_their_examples_parse():
    for arguments in COMMANDS:
        assert f"## `dkv {' '.join(arguments)}`" in DOCS, arguments
    blocks = re.findall(r"^```\n(.*?)^```$", DOCS, flags=re.MULTILINE | re.DOTALL)
    found = [example for block in blocks for example in examples(block) if "--install-completion" not in example]
    assert len(found) >= len(COMMANDS)
    for example in found:
        line = example[: example.index("|")] if "|" in example else example
        parsed(line)


def test_the_docs_name_only_options_that_exist():
    flags = {"--help", "--version", "--install-completion", "--show-completion"}
    for arguments in COMMANDS:
        command, _ = parsed([*arguments, *(["x", "-o", "x"] if arguments == ["profile"] else [])])
        flags |= {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", DOCS)) <= flags


def completed(words):
    """What bash is told to offer for the last of the words."""
    told = {"_DKV_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    return run_cli([], **told).stdout.split()


def run_cli(arguments, **environment):
    code = "import sys; from dkv.cli import main; sys.exit(main(sys.argv[1:]))"
    safe = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *safe, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_completion():
    assert completed(["dkv", "be"]) == ["bench"]
    assert completed(["dkv", "bench", ""]) == ["mlx", "memory", "decode", "prefill"]
    assert completed(["dkv", "recall", "--pl"]) == ["--plot"]
    script = run_cli([], _DKV_COMPLETE="source_bash")
    assert script.returncode == 0 and "complete -o" in script.stdout and "_DKV_COMPLETE=complete_bash" in script.stdout
