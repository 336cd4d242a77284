"""Recall and memory at long contexts, by a constructed transformer: ``python -m bench.induction --json FILE``.

Passcodes in random text of each length, read and asked for through the whole runtime, dense and compressed, each in a
process of its own so that its peak memory is its own. See ``dkv/benches/induction.py``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from dkv.benches import induction
from dkv.benches.results import write_json

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", default="4096,8192,16384,32768,65536,131072")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("dense", "dkv"), help="in this process")
    options = parser.parse_args()
    contexts = [int(each) for each in options.contexts.split(",")]
    if options.only:
        settings: dict[str, Any] = {"routers": ()} if options.only == "dense" else {"with_dense": False}
        print(json.dumps(induction.run(contexts, dtype=getattr(torch, options.dtype), **settings)))
        return
    rows: list[dict[str, Any]] = []
    for context in contexts:
        for kind in ("dense", "dkv"):
            alone = ["--contexts", str(context), "--dtype", options.dtype, "--only", kind]
            python = [sys.executable, *(["-P"] if sys.flags.safe_path else [])]
            done = subprocess.run([*python, "-m", "bench.induction", *alone], capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{context:,} tokens, {kind}: {done.stderr[-2000:]}")
            for row in json.loads(done.stdout.splitlines()[-1]):
                rows.append(row)
                grown = (row["peak_bytes"] - row["start_bytes"]) / MIB
                print(
                    f"{context:>8,} {row['variant']:>8}: {row['right']} of {row['asked']}, cache "
                    f"{row['cache_bytes'] / MIB:.1f} MiB, process grew by {grown:.1f} MiB, {row['seconds']} s",
                    flush=True,
                )
            write_json(options.json, rows)


if __name__ == "__main__":
    main()
