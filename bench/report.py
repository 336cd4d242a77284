"""What the benches measured, in docs/results.md, in README's tables and in its picture: ``python -m bench.report``.

Every file under bench/results/ has its table in docs/results.md; a file that nobody knows is an error, one that is not
there is left out. README's numbers stand between ``<!-- report:NAME -->`` and ``<!-- /report -->``. ``--check`` writes
nothing and exits with 1 where README or docs/results.md say something else than the files.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import report_tables
from bench.report_tables import SECTIONS, Rows, Section, spread, table, times
from dkv._paths import replaced
from dkv.benches.memory import GEOMETRIES

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"<!-- report:(\w+) -->(.*?)<!-- /report -->", flags=re.DOTALL)
META = ("command", "date", "versions")
HEAD = """# Results

Written by `python -m bench.report` from the files under `bench/results/`; `python -m bench.report --check` says whether
this page and README say what the files do. Each table has the command that makes its file. What the numbers mean, and
what is not good yet, is in README.md; how blocks are stored in [codec.md](codec.md).

![Memory of the KV cache, what compression loses, and recall](images/memory-and-recall.svg)
"""


class Results:
    """The files under a folder by name: what was measured, and what the file says of how."""

    def __init__(self, folder: Path) -> None:
        self.values: dict[str, Any] = {}
        self.made: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.iterdir()):
            if path.name not in SECTIONS:
                raise ValueError(f"{path} is in no section of bench/report_tables.py")
            text = path.read_text(encoding="utf-8")
            value = text if path.suffix == ".txt" else json.loads(text)
            self.made[path.name] = {}
            if isinstance(value, dict):
                self.made[path.name] = {key: value.pop(key) for key in META if key in value}
                value = value["rows"] if list(value) == ["rows"] else value
            self.values[path.name] = value

    def command(self, name: str) -> str:
        found = self.made[name].get("command") or SECTIONS[name].command
        if not found:
            raise ValueError(f"bench/results/{name} does not say which command made it, nor does its section")
        return found


# docs/results.md


def page(results: Results) -> str:
    """The whole of docs/results.md."""
    parts = [HEAD]
    parts += [_section(name, section, results) for name, section in SECTIONS.items() if name in results.values]
    return "\n".join(parts)


def _section(name: str, section: Section, results: Results) -> str:
    made = results.made[name]
    when = f" Measured on {made['date']}." if "date" in made else ""
    used = ", ".join(f"{package} {version}" for package, version in made.get("versions", {}).items())
    about = " ".join(filter(None, (section.about, f"{when} {used}.".strip() if used else when.strip())))
    lines = [f"## {section.title}", "", f"`{results.command(name)}`", ""]
    lines += [about, ""] if about else []
    return "\n".join([*lines, section.tables(results.values[name]), ""])


# README


def memory(rows: Rows) -> str:
    layouts = ("published R=128", "published R=64", "compact R=64", "default")
    lines = []
    for shape in GEOMETRIES:
        own = {row["layout"]: row for row in rows if row["model"] == shape.model}
        dense = f"{own['default']['dense_bytes']:,}"
        cells = [f"{own[each]['bytes_per_block_layer']:,} ({times(own[each]['ratio'])})" for each in layouts]
        lines.append([f"{shape.model} (Hkv={shape.num_kv_heads}, D={shape.head_dim}; dense {dense})", *cells])
    return table(("model", *layouts), lines)


def fidelity(rows: Rows) -> str:
    def name(row: dict[str, Any]) -> str:
        return f"**{row['name']}**" if row["name"] in ("quality", "balanced", "small") else row["name"]

    keys = ("std", "copy")
    lines = [
        [name(row), "-" if row["ratio"] is None else times(row["ratio"])]
        + [cell for key in keys for cell in (spread(row, f"{key}_kl"), f"{row[f'{key}_top1']:.3f}")]
        for row in rows
    ]
    return table(("", "ratio", "std KL", "top-1", "copy KL", "top-1"), lines)


def routing(rows: Rows) -> str:
    by_name = {row["name"]: row for row in rows}
    added = [by_name["top 8 by keys"][key] - by_name["balanced"][key] for key in ("std_kl", "copy_kl")]
    return f"{added[0]:.2g} and {added[1]:.2g}"


def recall(rows: Rows) -> str:
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    found = {(row["context"], row["variant"]): row for row in rows}
    lines = [
        [
            f"{context:,}",
            *(f"{found[context, each]['right']} ({times(found[context, each]['ratio'])})" for each in variants),
        ]
        for context in dict.fromkeys(row["context"] for row in rows)
    ]
    return table(("context", *variants), lines)


def recall_small(rows: Rows) -> str:
    found = {(row["context"], row["variant"]): row for row in rows}
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    small = [found[context, "preset small"] for context in contexts]
    lines = [
        [
            f"{row['context']:,}",
            *(f"{each['right']} of {each['trials']}" for each in (found[row["context"], "dense"], row)),
        ]
        for row in small
    ]
    return table(("context", "dense", f"small, {times(small[-1]['ratio'])}"), lines)


def recall_small_whole(rows: Rows) -> str:
    numbers = [f"{row['whole_cache_ratio']:.1f}" for row in rows if row["variant"] == "preset small"]
    return ", ".join(numbers[:-1]) + f" and {numbers[-1]}"


def decode(rows: Rows) -> str:
    columns = ("context", "DKV", "best dense (one bmm per kv head)", "SDPA", "best dense / DKV")
    lines = [
        [f"{row['context']:,}", *(f"{row[key]:.2f}" for key in ("ms", "dense_ms", "sdpa_ms")), times(row["ratio"])]
        for row in rows
    ]
    return table(columns, lines)


def decode_every_2(rows: Rows) -> str:
    found = [f"{times(row['ratio'])} at {row['context'] // 1024}k ({row['ms']:.2f} ms)" for row in rows]
    return ", ".join(found[:-1]) + f" and {found[-1]}"


def induction(rows: Rows) -> str:
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    found = {(row["context"], row["variant"]): row for row in rows}
    lines = []
    for context in dict.fromkeys(row["context"] for row in rows):
        own = [found[context, each] for each in variants]
        grown = [(row["peak_bytes"] - row["start_bytes"]) / 2**20 for row in (found[context, "dense"], own[-1])]
        held = [found[context, "dense"]["cache_bytes"] / 2**20, own[-1]["cache_bytes"] / 2**20]
        lines.append(
            [f"{context:,}", *(f"{row['right']} of {row['asked']}" for row in own)]
            + [f"{a:.0f} / {b:.0f}" for a, b in (held, grown)]
        )
    heads = ("dense", *(f'router "{each}"' for each in variants if each != "dense"))
    return table(("context", *heads, "cache, dense / DKV, MiB", "process grew, dense / DKV, MiB"), lines)


def prefill(rows: Rows) -> str:
    lines = [
        [f"{row['context']:,}", *(f"{row[key]:,.0f}" for key in ("ms", "sdpa_ms")), times(row["ratio"])] for row in rows
    ]
    return table(("tokens", "DKV ms", "SDPA causal ms", "SDPA / DKV"), lines)


def prefill_fidelity(rows: Rows) -> str:
    def said(row: dict[str, Any]) -> str:
        kl = f"std KL {row['std_kl']:.2g}, copy KL {row['copy_kl']:.2g}"
        return f"{row['visited']:.1%} of the key blocks visited: {kl}, {report_tables.recalled(row)} passcodes recalled"

    found = {row["name"]: row for row in rows}
    narrow = said(found["mass 0.89"])
    return f"by default {said(found['default'])}; with `prefill_mass=0.89, prefill_window=256` {narrow}"


def prefill_growth(rows: Rows) -> str:
    found = {row["context"]: row["ms"] for row in rows}
    return f"{math.log(found[65536] / found[16384]) / math.log(4):.2f}"


def roofline(rows: Rows) -> str:
    shown = [
        row
        for row in rows
        if (row["preset"], row["batch"], row["num_kv_heads"]) == ("default", 8, 8)
        and row["context"] in (16384, 65536, 131072, 1048576)
    ]
    lines = [
        [
            f"{row['context']:,}",
            *(f"{row[key] / 1e6:,.0f}" for key in ("all_reads", "dense_reads")),
            f"{row['reads_ratio']:.1f}x",
            *(f"{row['times']['H200'][key]:,.0f}" for key in ("us", "dense_us")),
        ]
        for row in shown
    ]
    return table(("context", "MB", "dense MB", "ratio", "least us", "dense, least us"), lines)


def aot(rows: Rows) -> str:
    targets = sorted({row["target"] for row in rows})
    counts = {sum(row["configurations"] for row in rows if row["target"] == target) for target in targets}
    return f"{' to '.join(map(str, sorted({min(counts), max(counts)})))} kernels for each of {', '.join(targets)}"


def mlx_loss(value: dict[str, Any]) -> str:
    return f"{value['nll']['mlx-lm, int4 weights']:.4f} nats a token, {value['nll']['torch, int4 weights']:.4f}"


def mlx_bytes(value: dict[str, Any]) -> str:
    engines = {row["engine"]: row["kv_bytes"] for row in value["rows"]}
    sizes = {engines[each] for each in ("mlx-lm DKV", "torch DKV")}
    found = " and ".join(f"{each / 1e6:.1f}" for each in sorted(sizes))
    return f"{found} MB of cache in both engines, {engines['torch dense'] / 1e6:.1f} MB dense"


def soak(value: dict[str, Any]) -> str:
    return f"{max(row['lse_error'] for row in value['rows']):.2g}"


def mutants(text: str) -> str:
    found = report_tables.mutants(text)
    total = {
        each: sum(n for (_, outcome), n in found.items() if outcome == each) for each in ("barrier", "guard", "same")
    }
    if any(outcome == "missed" for _, outcome in found):
        raise ValueError("bench/results/metal_mutants.txt has mutants that nothing notices: README says there are none")
    return f"{total['barrier']} and {total['guard']} of them; {total['same']} more change nothing"


BLOCKS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "memory": ("memory.json", memory),
    "fidelity": ("fidelity.json", fidelity),
    "routing": ("routing.json", routing),
    "recall": ("recall.json", recall),
    "recall_small": ("recall_small.json", recall_small),
    "recall_small_whole": ("recall_small.json", recall_small_whole),
    "decode": ("decode.json", decode),
    "decode_every_2": ("decode_every_2.json", decode_every_2),
    "induction": ("induction.json", induction),
    "prefill": ("prefill.json", prefill),
    "prefill_fidelity": ("prefill_fidelity.json", prefill_fidelity),
    "prefill_growth": ("prefill.json", prefill_growth),
    "roofline": ("roofline.json", roofline),
    "aot": ("aot.json", aot),
    "mlx_loss": ("mlx_lm.json", mlx_loss),
    "mlx_bytes": ("mlx_lm.json", mlx_bytes),
    "soak": ("soak.json", soak),
    "mutants": ("metal_mutants.txt", mutants),
}


def filled(text: str, results: Results) -> str:
    """README with what stands between its marks made anew; a table has lines of its own."""
    marks = re.findall(r"<!-- (/?report)\b", text)
    if marks != ["report", "/report"] * (len(marks) // 2) or len(BLOCK.findall(text)) != len(marks) // 2:
        raise ValueError("README's marks of bench.report do not pair")

    def made(block: re.Match[str]) -> str:
        name = block[1]
        if name not in BLOCKS:
            raise ValueError(f"README asks for {name!r}, bench.report knows {', '.join(BLOCKS)}")
        file, write = BLOCKS[name]
        content = write(results.values[file]) if file in results.values else ""
        own_lines = f"\n\n{content}\n\n" if block[2].startswith("\n") else content
        return f"<!-- report:{name} -->{own_lines}<!-- /report -->"

    return BLOCK.sub(made, text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where something differs")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    options = parser.parse_args(arguments)
    root = options.root
    try:
        results = Results(root / "bench" / "results")
        readme = root / "README.md"
        texts = {
            readme: filled(readme.read_text(encoding="utf-8"), results),
            root / "docs" / "results.md": page(results),
        }
    except ValueError as error:
        print(f"bench.report: {error}", file=sys.stderr)
        return 1
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if options.check:
            print(f"{path.relative_to(root)} does not say what bench/results/ holds: python -m bench.report")
        else:
            with replaced(path) as temporary:
                Path(temporary).write_text(texts[path], encoding="utf-8")
    if options.check:
        return 1 if stale else 0
    from bench.report_picture import draw

    picture = root / "docs" / "images" / "memory-and-recall.svg"
    picture.parent.mkdir(exist_ok=True)
    draw(results.values, picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
