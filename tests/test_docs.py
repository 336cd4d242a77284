"""Links of the documentation lead somewhere, every page is reached, and what the pages show is true and runs."""

import re

import pytest
from test_readme import ROOT, python_blocks

import dkv
from dkv import testing
from dkv.types import BlockFormat

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINKED = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "reference/README.md"))]
INCLUDE = re.compile(r"^```\{include\} (\S+)\n(?:.*\n)*?```$", flags=re.MULTILINE)
ELSEWHERE = {"mlx-lm.md", "msl-host.md"}  # their blocks run in test_mlx_lm.py and in test_msl_host.py
RUN_HERE = [page for page in PAGES if python_blocks(page) and page.name not in ELSEWHERE]
NEEDS = {"fused-ops.md": "torch", "distributed.md": "torch"}


def name_of(path):
    return str(path.relative_to(ROOT))


def prose(path):
    """A page's text without its code."""
    text = path.read_text(encoding="utf-8")
    text = INCLUDE.sub(lambda found: (path.parent / found.group(1)).read_text(encoding="utf-8"), text)
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path):
    """What GitHub and MyST make of the headings."""
    titles = re.findall(r"^#+ (.+)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", LINKED, ids=name_of)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]+`", "", prose(path))):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{target}: no such file"
        if anchor:
            assert anchor in anchors(there), f"{target}: no such heading"


@pytest.mark.parametrize(
    "path", [path for path in LINKED if path.name != "CHANGELOG.md"], ids=name_of
)  # it tells of what was
def test_files_that_pages_name_exist(path):
    for file in re.findall(r"`((?:docs|examples|tests|bench|reference|kernels)/[\w./-]+\.\w+)`", prose(path)):
        assert (ROOT / file).exists() or file.startswith("bench/results/"), f"{file}: no such file"


def test_every_page_is_in_a_list_of_pages():
    listed = set()
    for page in PAGES:
        for body in re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S):
            names = [line for line in body.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / f"{name}.md").resolve() for name in names}
    assert listed == {page.resolve() for page in PAGES} - {(DOCS / "index.md").resolve()}


def test_every_public_name_has_its_place_in_the_api():
    text = (DOCS / "api" / "dkv.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\.\. auto(?:function|class):: dkv\.(\w+)$", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(set(dkv.__all__) - {"__version__"})


def process_group(folder):
    """A group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)


@pytest.mark.parametrize("page", RUN_HERE, ids=name_of)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    namespace = {"__name__": page.stem}
    if page.name == "distributed.md":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        process_group(tmp_path)
    try:
        for block in python_blocks(page):
            exec(compile(block, name_of(page), "exec"), namespace)
    finally:
        if page.name == "distributed.md":
            import torch.distributed as dist

            dist.destroy_process_group()


def sizes_of(text, sizes):
    return tuple(sizes[axis] for axis in text.strip("[]").split(", "))


@pytest.mark.parametrize(
    "fmt",
    [
        BlockFormat(16, 5, 6),
        BlockFormat(16, 5, 15),
        BlockFormat(16, 0, 15, key_bits=(8, 6, 4, 4, 2, 2, 1, 0), value_bits=3),
        BlockFormat(16, 5, 6, factor_bits=16, residual_bits=16, minmax=True),
        BlockFormat(16, 5, 0, factor_bits=32, residual_bits=16),
    ],
    ids=str,
)
def test_the_table_of_parts_is_true(fmt):
    text = (DOCS / "fused-ops.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", text, flags=re.MULTILINE)
    fields = [name for name in dkv.CompressedBlocks.__dataclass_fields__ if name != "format"]
    assert [(int(place), name) for place, name, *_ in rows] == list(enumerate(fields))
    blocks = testing.make_inputs(0, dtype="float16", config=fmt).blocks
    every, coded, int8 = fmt.keeps_every_row, not fmt.exact_rows, fmt.factor_bits == 8
    holds = {"always": True, "not every row is kept": not every, "int8 factors": int8, "`r > 0`": blocks.rank > 0}
    holds |= {
        "coded rows": coded,
        "key channels of different widths": fmt.orders_channels,
        '`router="minmax"`': fmt.minmax,
    }
    holds |= {"sequences of fewer than `N` blocks": False}
    sizes = {"B": 2, "N": 3, "H": 2, "S": 16, "r": blocks.rank, "R": fmt.num_residuals, "D": 24, "Dv": 20}
    sizes["Q"] = -(-fmt.num_residuals // 128)
    dtypes = {"cache": "float16", "factor": {8: "int8", 16: "float16", 32: "float32"}[fmt.factor_bits]}
    for _, name, shape, dtype, stored in rows:
        part = getattr(blocks, name)
        conditions = stored.partition(";")[0].split(", ")
        assert (part is not None) == all(holds[condition] for condition in conditions), name
        if part is None:
            continue
        plain, _, as_codes = shape.replace("`", "").partition(", coded ")
        kind, _, kind_of_codes = dtype.partition(", coded ")
        if coded and as_codes:
            sizes["bytes"] = part.shape[-1]
            plain, kind = as_codes, kind_of_codes
        assert part.shape == sizes_of(plain, sizes), name
        assert part.dtype.name == dtypes.get(kind, kind), name
