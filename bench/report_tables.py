"""A full table for each file under ``bench/results/``; ``bench/report.py`` puts them into ``docs/results.md``."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

MUTANT = re.compile(r"^(\w+) \| \S+:\d+ \| (.+?) \| ([^\n]*)$", flags=re.MULTILINE | re.DOTALL)
Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Section:
    """What ``docs/results.md`` says of a file; ``command`` is for files that do not name theirs."""

    title: str
    command: str
    about: str
    tables: Callable[[Any], str]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [list(columns), ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def cell(value: Any) -> str:
    """Anything that a row holds, short."""
    if value is None or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {cell(each)}" for key, each in value.items())
    return ", ".join(map(cell, value)) if isinstance(value, list) else str(value)


def plain(value: Any) -> str:
    """Whatever a file holds: its rows as they are, and what is said once as a list."""
    if isinstance(value, list):
        if not all(isinstance(row, dict) for row in value):
            return "\n".join(f"- {cell(row)}" for row in value)
        columns = list(dict.fromkeys(key for row in value for key in row))
        return table(
            [name.replace("_", " ") for name in columns], [[cell(row.get(name)) for name in columns] for row in value]
        )
    once = [f"- {name.replace('_', ' ')}: {cell(each)}" for name, each in value.items() if not _is_table(each)]
    parts = ["\n".join(once)] if once else []
    parts += [f"{name.replace('_', ' ')}:\n\n{plain(each)}" for name, each in value.items() if _is_table(each)]
    return "\n\n".join(parts)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def times(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}x"


def spread(row: dict[str, Any], metric: str) -> str:
    """A mean and its standard deviation."""
    found = row.get(f"{metric}_spread")
    return f"{row[metric]:.2g}" + ("" if found is None else f" ± {found:.2g}")


def recalled(row: dict[str, Any]) -> str:
    return "-" if row["recall"] is None else f"{round(row['recall'] * row['n'])} of {row['n']}"


def memory(rows: Rows) -> str:
    columns = ("model", "layout", "bytes", "dense bytes", "ratio")
    keys = ("bytes_per_block_layer", "dense_bytes")
    return table(
        columns,
        [[row["model"], row["layout"], *(f"{row[key]:,}" for key in keys), times(row["ratio"])] for row in rows],
    )


def fidelity(rows: Rows) -> str:
    columns = ("", "ratio", "whole cache", "std KL", "top-1", "copy KL", "top-1", "recall")
    return table(
        columns,
        [
            [
                row["name"],
                times(row["ratio"]),
                times(row["whole_cache_ratio"]),
                spread(row, "std_kl"),
                f"{row['std_top1']:.3f}",
                spread(row, "copy_kl"),
                f"{row['copy_top1']:.3f}",
                recalled(row),
            ]
            for row in rows
        ],
    )


def prefill_fidelity(rows: Rows) -> str:
    columns = ("limit", "visited", "std KL", "top-1", "copy KL", "top-1", "recall", "end std KL", "end copy KL")
    return table(
        columns,
        [
            [
                row["name"],
                f"{row['visited']:.1%}",
                spread(row, "std_kl"),
                f"{row['std_top1']:.3f}",
                spread(row, "copy_kl"),
                f"{row['copy_top1']:.3f}",
                recalled(row),
                spread(row, "end_std_kl"),
                spread(row, "end_copy_kl"),
            ]
            for row in rows
        ],
    )


def recall(rows: Rows) -> str:
    columns = ("context", "variant", "right", "ratio, blocks", "ratio, whole cache")
    return table(
        columns,
        [
            [
                f"{row['context']:,}",
                row["variant"],
                f"{row['right']} of {row['trials']}",
                times(row["ratio"]),
                times(row["whole_cache_ratio"]),
            ]
            for row in rows
        ],
    )


def decode(rows: Rows) -> str:
    keys = ("context", "ms", "route_ms", "other_ms", "close_ms", "dense_ms", "sdpa_ms", "top_k", "route_every")
    columns = (
        *("context", "DKV ms", "a step that routes", "one that does not", "closing a block"),
        *("best dense ms", "SDPA ms", "blocks", "routed every", "best dense / DKV"),
    )
    return table(columns, [[*(cell(row[key]) for key in keys), times(row["ratio"])] for row in rows])


def prefill(rows: Rows) -> str:
    columns = ("tokens", "DKV ms", "SDPA causal ms", "SDPA / DKV", "exponent since a fourth as long")
    keys = ("context", "ms", "sdpa_ms")
    return table(
        columns, [[*(cell(row[key]) for key in keys), times(row["ratio"]), cell(row["exponent"])] for row in rows]
    )


def roofline(rows: Rows) -> str:
    devices = list(rows[0]["times"])
    columns = (
        *("preset", "context", "batch", "Hkv", "MB read", "each address once", "by the router", "dense MB", "ratio"),
        *("launches", *(f"{name}, us / dense" for name in devices)),
    )
    sizes = ("all_reads", "unique_reads", "router_reads", "dense_reads")
    return table(
        columns,
        [
            [
                row["preset"],
                *(f"{row[key]:,}" for key in ("context", "batch", "num_kv_heads")),
                *(f"{row[key] / 1e6:,.2f}" for key in sizes),
                f"{row['reads_ratio']:.1f}x",
                str(len(row["kernels"])),
                *(f"{row['times'][name]['us']:,.0f} / {row['times'][name]['dense_us']:,.0f}" for name in devices),
            ]
            for row in rows
        ],
    )


def aot(rows: Rows) -> str:
    targets = sorted({row["target"] for row in rows})
    found = {(row["kernel"], row["target"]): row for row in rows}

    def one(kernel: str, target: str) -> str:
        row = found.get((kernel, target))
        return "-" if row is None else f"{cell(row['registers'])} / {cell(row['spills'])}"

    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    most = {kernel: max(row["configurations"] for row in rows if row["kernel"] == kernel) for kernel in kernels}
    return table(
        ("kernel", "configurations", *targets),
        [[f"`{kernel}`", str(most[kernel]), *(one(kernel, target) for target in targets)] for kernel in kernels],
    )


def mlx_lm(value: dict[str, Any]) -> str:
    losses = table(("dense loss", "nats a token"), [[name, f"{nll:.4f}"] for name, nll in value["nll"].items()])
    answers = table(
        ("same greedy answer", ""), [[name, cell(same)] for name, same in value["same_greedy_answer"].items()]
    )
    columns = ("context", "engine", "KV MB", "dense / KV", "recall", "answer")
    rows = [
        [
            f"{row['context']:,}",
            row["engine"],
            f"{row['kv_bytes'] / 1e6:.1f}",
            times(row["ratio"]),
            f"{row['right']} of {row['trials']}",
            "; ".join(row["answers"]),
        ]
        for row in value["rows"]
    ]
    where = f"{value['what']}. {value['where']}; {cell(value['settings'])}."
    return "\n\n".join((where, losses, answers, table(columns, rows)))


def induction(rows: Rows) -> str:
    columns = ("context", "cache", "passcodes right", "blocks", "attended", "cache MB", "peak MB", "at the start MB")
    sizes = ("cache_bytes", "peak_bytes", "start_bytes")
    return table(
        columns,
        [
            [
                f"{row['context']:,}",
                row["variant"],
                f"{row['right']} of {row['asked']}",
                cell(row["blocks"]),
                cell(row["top_k"]),
                *(f"{row[key] / 1e6:,.1f}" for key in sizes),
            ]
            for row in rows
        ],
    )


def stitched(rows: Rows) -> str:
    return table(
        ("layer", "context", "blocks", "attended", "chosen by", "error, mean of heads", "worst head"),
        [
            [
                *(cell(row[key]) for key in ("layer", "context", "blocks", "top_k")),
                *(name, f"{error:.2g}", f"{row['worst_head'][name]:.2g}"),
            ]
            for row in rows
            for name, error in row["error"].items()
        ],
    )


def mutants(text: str) -> Counter[tuple[str, str]]:
    """How many, by kernel and outcome: "barrier", "guard" (caught), "same" (it changes nothing), "missed"."""
    found: Counter[tuple[str, str]] = Counter()
    for kernel, what, result in MUTANT.findall(text):
        caught = "barrier" if what == "barrier" else "guard"
        outcome = "same" if result.startswith("same:") else "missed" if result.startswith("NOT CAUGHT") else caught
        found[kernel, outcome] += 1
    return found


def metal_mutants(text: str) -> str:
    found = mutants(text)
    outcomes = ("barrier", "guard", "same", "missed")
    rows = [
        [kernel, *(str(found[kernel, outcome]) for outcome in outcomes)]
        for kernel in dict.fromkeys(k for k, _ in found)
    ]
    total = ["all", *(str(sum(found[row[0], outcome] for row in rows)) for outcome in outcomes)]
    return table(("kernel", "barriers noticed", "guards noticed", "change nothing", "not noticed"), [*rows, total])


KL_NOTE = (
    'KL from the dense cache in nats, mean of the texts ± their standard deviation; "std": the text\'s own '
    'continuation, "copy": passages repeated from far back; recall: passcodes, of those that the dense cache knows.'
)
RESULTS = "bench/results"
SECTIONS = {
    "memory.json": Section(
        "Bytes of a block and layer",
        f"dkv bench memory --json {RESULTS}/memory.json",
        'Counted from real arrays, float16. "Published R" leaves out the residual positions (1 byte each), as the '
        'publication does; "as stored" is what dkv holds for the same settings.',
        memory,
    ),
    "fidelity.json": Section(
        "Compressed cache against the dense one",
        'dkv fidelity --trials 0 --variants "paper R=64,default,quality,balanced,small" --json '
        f"{RESULTS}/fidelity.json",
        f"SmolLM2-135M, float32, 7,424 tokens of which 6,912 are compressed. {KL_NOTE}",
        fidelity,
    ),
    "front.json": Section(
        "Ways of storing",
        f"python -m bench.front --json {RESULTS}/front.json",
        f"The comparisons of docs/codec.md, on other texts than the table above. {KL_NOTE}",
        fidelity,
    ),
    "routing.json": Section(
        "Routers",
        f"dkv fidelity --routing --trials 0 --no-peers --json {RESULTS}/routing.json",
        f'The preset "balanced", fed one token at a time, each a decode step with its own selection. {KL_NOTE}',
        fidelity,
    ),
    "scans.json": Section(
        "Decode steps that share a scan",
        "",
        f"Default format, four blocks attended, steps between scans select among eight candidates. {KL_NOTE}",
        fidelity,
    ),
    "prefill_fidelity.json": Section(
        "Block-sparse prefill against dense prefill",
        f"dkv fidelity --prefill --offsets 0,20000 --trials 5 --json {RESULTS}/prefill_fidelity.json",
        "Visited: key blocks attended, of those that a dense prefill attends; end: the continuation read "
        f"block-sparsely too. {KL_NOTE}",
        prefill_fidelity,
    ),
    "recall.json": Section(
        "Recall of a buried number",
        f"dkv recall --contexts 1024,2048,4096 --trials 5 --json {RESULTS}/recall.json",
        "SmolLM2-135M, bfloat16; asked after compression, window 256.",
        recall,
    ),
    "recall_small.json": Section(
        'Recall of a buried number, preset "small"',
        f"dkv recall --contexts 2048,4096,7680 --trials 20 --preset small --alone --json {RESULTS}/recall_small.json",
        "SmolLM2-135M, bfloat16; asked after compression, window 256, routing as the preset has it.",
        recall,
    ),
    "induction.json": Section(
        "Recall and memory at long contexts, by a constructed transformer",
        f"python -m bench.induction --json {RESULTS}/induction.json",
        "Its weights are written down, not trained: it copies what followed an earlier copy. Each row in a process "
        "of its own.",
        induction,
    ),
    "stitched.json": Section(
        "Attention over long contexts of real keys",
        f"python -m bench.stitched --contexts 8192,16384 --json {RESULTS}/stitched.json",
        "One layer of SmolLM2-135M, keys turned to their positions: distance of the output from exact attention over "
        'its length. "every n": a selection of blocks serves n queries.',
        stitched,
    ),
    "decode.json": Section(
        "Decode step of one attention layer",
        f"dkv bench decode --contexts 4096,16384,65536,131072 --dtype float32 --json {RESULTS}/decode.json",
        "Qwen2.5-1.5B geometry; a whole step of the runtime, routing and 1/256 of closing a block included.",
        decode,
    ),
    "decode_every_2.json": Section(
        "Decode step of one attention layer, every second one scanning all blocks",
        "dkv bench decode --contexts 65536,131072,262144 --dtype float32 --route-every 2 --json "
        f"{RESULTS}/decode_every_2.json",
        "As above; the other steps select among the candidates of the last scan.",
        decode,
    ),
    "prefill.json": Section(
        "Prefill of one attention layer",
        f"dkv bench prefill --contexts 4096,8192,16384,32768,65536 --repeats 1 --json {RESULTS}/prefill.json",
        "Qwen2.5-1.5B geometry, default limits, selection included.",
        prefill,
    ),
    "context_parallel.json": Section(
        "Context parallel",
        f"python -m bench.context_parallel --json {RESULTS}/context_parallel.json",
        "Bytes that a rank sends to each other one in a decode step. Times are of processes that share one "
        "machine's cores.",
        plain,
    ),
    "mlx_lm.json": Section(
        "In mlx-lm",
        f"python -m bench.mlx_smollm2 --json {RESULTS}/mlx_lm.json",
        "That the two engines compute the same. A Linux CPU runs MLX: no time of it says anything.",
        mlx_lm,
    ),
    "roofline.json": Section(
        "Bytes of a decode step on a GPU, on paper",
        f"python -m bench.roofline --json {RESULTS}/roofline.json",
        "Counted from the launches; D = 128, bfloat16, top 16 blocks. Nothing of it is a measured time.",
        roofline,
    ),
    "aot.json": Section(
        "Kernels compiled without a GPU",
        f"python -m bench.aot --json {RESULTS}/aot.json",
        "Registers / bytes of spills a thread: the worst of a kernel's configurations, by target.",
        aot,
    ),
    "gpu.json": Section("On a GPU", f"bash bench/gpu.sh {RESULTS}", "Parity first, then times.", plain),
    "overhead.json": Section(
        "Host time of a call",
        f"python -m bench.overhead --json {RESULTS}/overhead.json",
        "Microseconds, medians.",
        plain,
    ),
    "soak.json": Section(
        "A million tokens through one cache of bounded size",
        f"python -m bench.soak --json {RESULTS}/soak.json",
        "Synthetic rows; a decode step now and then beside float64 attention over the rows that are to be there.",
        plain,
    ),
    "faults.json": Section(
        "What was tried to break it",
        f"python -m bench.faults --json {RESULTS}/faults.json",
        "Spoilt files, killed writers, bad arguments, and state machines of the tests with more examples.",
        plain,
    ),
    "metal_mutants.txt": Section(
        "Metal sources broken in one place at a time",
        f"python tests/metal_mutants.py > {RESULTS}/metal_mutants.txt",
        "Each barrier taken out, each guard left away: what the tests notice.",
        metal_mutants,
    ),
}
