"""Every example runs as its docstring says, at a small size."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
DOCUMENT = "".join(
    f"Entry {number}: the wind came from the {'NESW'[number % 4]}, {number} boats. " for number in range(24)
)


def run(name, *arguments, launcher=(), wrong=False):
    """What an example prints; where something is ``wrong``, the last line of what it complains."""
    local = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"), "TRITON_INTERPRET": "1"}
    command = [sys.executable, *launcher, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | local)
    assert (done.returncode != 0) == wrong, done.stderr[-2000:]
    return done.stderr.strip().splitlines()[-1] if wrong else done.stdout


def needs(*packages):
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


@pytest.fixture
def document(tmp_path):
    file = tmp_path / "log.txt"
    file.write_text(DOCUMENT, encoding="utf-8")
    return file


def test_each_says_how_it_is_run():
    scripts = sorted(set(EXAMPLES.glob("*.py")) - {EXAMPLES / "conversation.py"})
    assert len(scripts) == 6
    for script in scripts:
        assert f"examples/{script.name}" in script.read_text(encoding="utf-8").split('"""')[1], script.name


def test_a_kept_cache_answers_as_a_chat_does(tiny, document, tmp_path):
    needs("transformers", "safetensors")
    kept, same = tmp_path / "log.safetensors", ["--model", tiny, "--window", 64]
    short = ["--max-new-tokens", 6]
    turns = ["--question", "Which wind?", "--question", "How many boats?"]
    printed = run("chat.py", document, *same, *short, *turns)
    size, first, second = printed.split("Question:")
    tokens, held, dense = re.match(r"([\d,]+) tokens: ([\d.]+) MB, where dense takes ([\d.]+)", size).groups()
    assert int(tokens.replace(",", "")) == len(DOCUMENT) and 0 < float(held) <= float(dense)
    assert "How many boats?" in second and second.partition("Answer:")[2].strip()

    assert f"{len(DOCUMENT):,} tokens in " in run("save_and_ask.py", "save", document, kept, *same)
    answer = run("save_and_ask.py", "ask", kept, "Which wind?", *same, *short)
    assert answer.strip() == first.partition("Answer:")[2].strip() != ""
    assert "window" in run("save_and_ask.py", "ask", kept, "Which wind?", "--model", tiny, wrong=True)


def test_mlx_lm_generate(tiny, document):
    needs("mlx_lm")
    printed = run("mlx_lm_generate.py", document, "Which wind?", "--model", tiny, "--max-tokens", 4, "--window", 64)
    assert f"{len(DOCUMENT):,} tokens: " in printed and "\nAnswer:" in printed


def test_plain_decoder():
    needs("torch")
    size = ["--tokens", 700, "--steps", 3]
    printed = run("plain_decoder.py", *size, "--exact", "--compile", "aot_eager")
    assert "256 of 700 tokens in blocks" in printed and "the same in 3 of 3" in printed


def test_new_kernel():
    needs("torch", "triton")
    assert "matches the reference: 1 seeds, 3 dtypes" in run("new_kernel.py", "--seeds", 1)
    assert "AssertionError: merge_states float32: out" in run("new_kernel.py", "--seeds", 1, "--mistake", wrong=True)


def test_context_parallel():
    needs("torch")
    launcher = ("-P", "-m", "torch.distributed.run", "--nproc-per-node", "2")
    printed = run("context_parallel.py", "--blocks", 3, launcher=launcher)
    assert sorted(re.findall(r"^rank (\d): (\d) of 3 blocks", printed, flags=re.MULTILINE)) == [("0", "2"), ("1", "1")]
