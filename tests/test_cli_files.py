"""What the command line writes: JSON, pictures and progress; and what is left when it is stopped."""

import importlib.util
import json
import os
import signal
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from dkv import models  # noqa: E402
from dkv.benches import demo, memory, results  # noqa: E402
from dkv.cli import _common, main  # noqa: E402

SMALL = ["--tokens", "700", "--window", "64", "--block-size", "64", "--dtype", "float32"]
MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.fixture
def no_model(monkeypatch):
    """Nothing may be loaded or measured."""

    def refuse(*arguments, **options):
        raise AssertionError("the work began")

    monkeypatch.setattr(models, "load", refuse)
    monkeypatch.setattr(memory, "run", refuse)
    monkeypatch.setattr(models, "require", refuse)


def drawing():
    pytest.importorskip("matplotlib")
    from dkv.benches import plots

    return plots


# JSON


def test_json_says_what_made_it_and_stdout_can_have_it(tiny, tmp_path, capsys):
    options = ["generate", "--model", tiny, "--prompt", "abc " * 60, "--max-new-tokens", "3", "--json"]
    assert main([*options, "-"]) == 0
    printed = capsys.readouterr()
    made = json.loads(printed.out)
    assert (made["prompt_tokens"], made["new_tokens"], made["config"]["top_k"]) == (240, 3, 16)
    assert made["command"] == f"dkv generate --model {tiny} --prompt '{'abc ' * 60}' --max-new-tokens 3 --json -"
    assert made["versions"]["torch"] == torch.__version__ and len(made["date"]) == 10
    assert made["text"] in printed.err and "KV cache" in printed.err
    file = tmp_path / "made.json"
    assert main([*options, str(file), "--dense"]) == 0
    printed = capsys.readouterr()
    again = json.loads(file.read_text())
    assert printed.out.strip("\n") == again["text"].strip("\n") and again["config"] is None
    assert again["kv_bytes"] == again["dense_kv_bytes"] and again["command"].endswith("--dense")


def test_tables_leave_stdout_to_json(capsys):
    assert main(["bench", "memory", "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["rows"]) == 18 and "182,216" in printed.err


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "rows.json"
    file.write_text("old")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(_common.CliError, match="cannot write .*rows.json: No space left"):
            _common.write_json(file, [1])
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["rows.json"]
    link = tmp_path / "link.json"
    link.symlink_to(file)
    results.write_json(link, [1])
    assert link.is_symlink() and results.read_rows(file) == [1]


def test_a_device_stays_a_device(capsys):
    _common.check_writable(os.devnull)
    assert main(["info", "--json", os.devnull]) == 0
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert "backend" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["demo"], ["generate", "--prompt", "a"], ["recall"], ["fidelity"], ["profile", "x", "-o", "p.json"], ["info"]]
    + [["bench", name] for name in ("memory", "decode", "prefill", "mlx")],
    ids=" ".join,
)
def test_what_cannot_be_written_is_refused_before_the_work(arguments, no_model, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    bad = [["--json", "no/such/x.json"], ["--json", str(tmp_path)], ["--json", "x" * 300]]
    pictured = arguments[0] in ("recall", "fidelity", "bench")
    if pictured:
        bad += [["--plot", "no/such/x.svg"], ["--plot", "x.jpeg"], ["--plot", "svg"]]
    for more in bad:
        assert main([*arguments, *more]) == 2, more
        printed = capsys.readouterr()
        assert printed.out == "" and len(printed.err.splitlines()) == 1 and more[1] in printed.err
    if pictured:
        find = importlib.util.find_spec
        with monkeypatch.context() as patch:
            patch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
            assert main([*arguments, "--plot", "x.svg"]) == 2
        assert capsys.readouterr().err == 'dkv: --plot needs matplotlib: pip install "dkv[plot]"\n'
    assert os.listdir(tmp_path) == []


# Pictures


def test_pictures_of_recall(tiny, tmp_path):
    drawing()
    options = ["recall", "--model", tiny, "--contexts", "800", "--depths", "3", "--trials", "1", "--dtype", "float32"]
    assert main([*options, "--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.svg")]) == 0
    rows = results.read_rows(tmp_path / "r.json")
    for row in rows:
        depths = [answer["depth"] for answer in row["answers"]]
        assert row["trials"] == 3 and len(set(depths)) == 3 and depths == sorted(depths)
        assert row["right"] == sum(answer["right"] for answer in row["answers"])
    drawn = (tmp_path / "r.svg").read_text()
    for text in ("dense", "paper R=64", "default", "33% to 67%", "800"):
        assert f"<!-- {text} -->" in drawn, text
    assert len(os.listdir(tmp_path)) == 2


def test_a_heat_map_counts_where_it_was_asked(tmp_path):
    answers = [{"depth": 0.05, "right": True}, {"depth": 0.15, "right": False}, {"depth": 1.0, "right": True}]
    rows = [{"context": 1024, "variant": "default", "answers": answers}]
    right, asked = drawing().answered(rows, [512, 1024], 5)
    assert right.tolist() == [[0, 1], [0, 0], [0, 0], [0, 0], [0, 1]]
    assert asked.tolist() == [[0, 2], [0, 0], [0, 0], [0, 0], [0, 1]]
    drawing().recall(rows, tmp_path / "x.svg", 5)
    drawn = (tmp_path / "x.svg").read_text()
    assert drawn.count("<!-- 1/2 -->") == 1 and drawn.count("<!-- 1/1 -->") == 1


@pytest.mark.parametrize("suffix", MAGIC)
def test_pictures_are_what_their_names_say_and_the_same_again(suffix, tmp_path, monkeypatch):
    plots = drawing()
    rows = [
        {"context": context, "ms": 1.0, "dense_ms": context / 4096, "sdpa_ms": context / 2048}
        for context in (4096, 16384)
    ]
    bytes_of = []
    for name in ("one", "two"):
        plots.times(rows, tmp_path / f"{name}{suffix}", "a step")
        bytes_of.append((tmp_path / f"{name}{suffix}").read_bytes())
    assert bytes_of[0] == bytes_of[1] and bytes_of[0].startswith(MAGIC[suffix])


def test_curves_have_dense_beside_them(tmp_path, capsys):
    plots = drawing()
    assert main(["bench", "memory", "--plot", str(tmp_path / "m.svg")]) == 0
    drawn = (tmp_path / "m.svg").read_text()
    for text in ("dense", "published R=64", "default", "SmolLM2-135M, float16", "256k"):
        assert f"<!-- {text} -->" in drawn, text
    engine = {"prefill_seconds": 2.0, "decode_tokens_per_second": 5.0, "kv_bytes": 1e6}
    rows = [
        {"context": context, "engine": name, **engine} for context in (1024, 2048) for name in ("mlx-lm dense", "DKV")
    ]
    plots.engines(rows, tmp_path / "e.svg", "a model")
    drawn = (tmp_path / "e.svg").read_text()
    assert drawn.count("<!-- mlx-lm dense -->") == 3 and "<!-- seconds per token -->" in drawn


def test_curves_of_memory_start_together_and_end_at_their_ratio():
    shape = memory.GEOMETRIES[0]
    rows = [{"model": shape.model, "layout": "half", "bytes_per_block_layer": memory.dense_block_nbytes(shape) / 2}]
    found = memory.cache_curves(rows, shape)
    contexts, dense = found["dense"]
    assert dense[0] == contexts[0] * shape.num_layers * 4 * shape.num_kv_heads * shape.head_dim == found["half"][1][0]
    assert dense[-1] / found["half"][1][-1] == pytest.approx(2, rel=2e-3)


# Progress


class Counted:
    """Stands in for the progress bar: what was promised, and what was told."""

    def __init__(self):
        self.total, self.steps, self.labels = None, 0, []

    def __call__(self, total=None):
        self.total = total
        return self

    def __enter__(self):
        return self.told

    def __exit__(self, *exc):
        pass

    def told(self, label, steps=1):
        self.steps += steps
        self.labels.append(label)


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", *SMALL, "--no-route"],
        ["recall", "--contexts", "700,800", "--trials", "1"],
        ["profile", "--passages", "1", "--passage-tokens", "200", "--repeat-tokens", "50", "--distances", "60,150"],
        ["fidelity", "--tokens", "1280", "--offsets", "0", "--trials", "0", "--no-peers", "--variants", "default"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_progress_ends_where_it_should(arguments, tiny, small_prices, tmp_path, monkeypatch):
    counted = Counted()
    monkeypatch.setattr(_common, "progress", counted)
    model = [tiny, "-o", str(tmp_path / "p.json")] if arguments[0] == "profile" else ["--model", tiny]
    assert main([arguments[0], *model, *arguments[1:]]) == 0
    assert counted.steps == counted.total > 3 and all(counted.labels)


def test_progress_in_a_pipe_is_plain_lines_now_and_then(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with _common.progress(4) as advance:
        for label in ("a", "b", "c", "d"):
            advance(label)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(_common, "EVERY_SECONDS", -1)
    with _common.progress(4) as advance:
        for label in ("a", "b", "c", "d"):
            advance(label)
    assert capsys.readouterr().err == "a (0%)\nb (25%)\nc (50%)\nd (75%)\n"
    with _common.progress() as advance:
        advance("somewhere")
    assert capsys.readouterr().err == "somewhere\n"


@pytest.mark.skipif(sys.platform == "win32", reason="a terminal of POSIX")
@pytest.mark.parametrize("colours", [True, False])
def test_a_bar_on_a_terminal(colours):
    import pty

    code = (
        "import sys, time; from dkv.cli import _common\n"
        "with _common.progress(2) as advance: advance('first'); time.sleep(0.2); advance('second'); time.sleep(0.2)\n"
        "_common.err.print('end')"
    )
    master, terminal = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    environment |= {"TERM": "xterm-256color", **({} if colours else {"NO_COLOR": "1"})}
    subprocess.run([*PYTHON, "-c", code], stderr=terminal, env=environment, check=True)
    os.close(terminal)
    seen = os.read(master, 65536).decode()
    os.close(master)
    assert "first" in seen and "second" in seen and "50%" in seen and "end" in seen
    assert ("\x1b[38;5;" in seen or "\x1b[3" in seen) == colours


# Exit codes


PYTHON = [sys.executable, *(["-P"] if sys.flags.safe_path else [])]


@pytest.mark.parametrize(("right", "code"), [((True, True), 0), ((True, False), 1), ((False, False), 0)])
def test_the_demo_fails_when_it_forgot(right, code, tiny, tmp_path, monkeypatch, capsys):
    rows = [
        demo.Row(name, "x", knew, 10, 1.0, 2.0, 0, "", 1.0, 1.0)
        for name, knew in zip(("dense", "DKV"), right, strict=True)
    ]
    monkeypatch.setattr(demo, "run", lambda *arguments, **options: rows)
    file = tmp_path / "demo.json"
    assert main(["demo", "--model", tiny, *SMALL, "--json", str(file)]) == code
    assert ("these settings forget" in capsys.readouterr().out) == (code == 1)
    assert [row["right"] for row in results.read_rows(file)] == list(right)


@pytest.mark.parametrize(("arguments", "what"), [(["info", "--json", "-"], "-"), (["info"], "the output")])
def test_no_space_for_the_output(arguments, what):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    code = "import sys; from dkv.cli import main; sys.exit(main(sys.argv[1:]))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([*PYTHON, "-c", code, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, f"dkv: cannot write {what}: No space left on device\n")


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_stopped_in_the_middle_nothing_is_half_written(number, code, word, tiny, tmp_path):
    file = tmp_path / "recall.json"
    file.write_text("old")
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell may have it ignored
        "from dkv.cli import _common, main; _common.EVERY_SECONDS = -1; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["recall", "--model", tiny, "--contexts", "2048", "--trials", "1000", "--json", str(file)]
    process = subprocess.Popen([*PYTHON, "-c", program, *arguments], stdout=-1, stderr=-1, text=True)
    assert process.stderr.readline().startswith("2,048 tokens, trial 1 of 1000")
    process.send_signal(number)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    assert out == "" and errors.splitlines()[-1] == f"dkv: {word}" and "Traceback" not in errors
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["recall.json"]


def test_a_handler_of_the_caller_is_back_afterwards():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert main(["--version"]) == 0
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


# Commands as files name them


def test_the_command_of_a_module(monkeypatch):
    spec = SimpleNamespace(name="bench.induction")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    monkeypatch.setattr(sys, "argv", ["/somewhere/bench/induction.py", "--contexts", "1,2"])
    assert results.command() == "python -m bench.induction --contexts 1,2"
    token = results.command_line.set(["bench", "mlx", "--model", "a b"])
    try:
        assert results.command() == "dkv bench mlx --model 'a b'"
    finally:
        results.command_line.reset(token)


def test_rows_are_read_from_both_forms(tmp_path):
    for value in ([{"a": 1}], {"command": "x", "rows": [{"a": 1}]}):
        (tmp_path / "x.json").write_text(json.dumps(value))
        assert results.read_rows(tmp_path / "x.json") == [{"a": 1}]
    (tmp_path / "x.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="x.json holds no rows"):
        results.read_rows(tmp_path / "x.json")
