"""The README's Python blocks run, in order, in one namespace."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
SETTINGS = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")


def python_blocks(path):
    return re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_python_blocks_run(capsys):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    blocks = python_blocks(README)
    assert len(blocks) >= 3
    namespace = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "bytes instead of" in printed
    cache = namespace["cache"]
    assert cache.nbytes < cache.dense_nbytes and cache.compressed_nbytes > 0
    assert namespace["both"].out.shape == (1, 6, 1, 64)


def test_ci_reads_its_command_from_the_readme():
    assert 'pip install -e ".[demo]" && dkv demo' in TEXT.splitlines()
    assert 'pip install -e ".[test]" && TRITON_INTERPRET=1 pytest' in TEXT.splitlines()
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    pattern = re.search(r"grep -m1 -E '(.*)' README\.md", script)
    assert pattern is not None
    found = subprocess.run(
        ["grep", "-m1", "-E", pattern.group(1), "README.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == 'pip install -e ".[test]" && TRITON_INTERPRET=1 pytest'


def test_settings_table_is_true():
    import dkv

    config = dkv.DKVConfig()
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| ", SETTINGS.split("##")[0], flags=re.MULTILINE)
    assert len(rows) >= 10
    for name, default in rows:
        value = getattr(config, name)
        if value is not None:
            stated = default.strip("`").strip('"')
            assert str(value) == stated, f"{name}: docs/settings.md says {stated}, the default is {value}"
