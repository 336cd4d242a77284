"""The ways of storing that docs/codec.md compares, by the protocol of `dkv fidelity`, on texts that it does not report.

python bench/front.py --json bench/results/front.json [--model smollm2-135m] [--profile FILE] [--offsets 84000,95000]
"""

from __future__ import annotations

import argparse
import json

from dkv import DKVConfig, HeadProfile, HeadTier, models
from dkv.benches import fidelity
from dkv.sensitivity import KEY_OPTIONS

ORDERED = {sum(widths) / len(widths): widths for widths in KEY_OPTIONS}  # by mean bits


def variants(profile: HeadProfile) -> dict[str, DKVConfig]:
    """Every comparison of docs/codec.md by name."""

    def widths(key: int, value: int) -> DKVConfig:
        return DKVConfig(rank=0, router="keys", key_bits=(key,) * 8, value_bits=value)

    def tiers(*parts: HeadTier) -> DKVConfig:
        return DKVConfig(rank=0, router="keys", tiers=parts, profile=profile)

    int4 = HeadTier(0.5, residual_bits=4)
    found = {f"K{key} V{value}": widths(key, value) for key, value in ((4, 4), (8, 4), (4, 8), (3, 4), (4, 3), (2, 4))}
    found |= {
        f"K{mean:g} by importance, V4": tiers(HeadTier(1.0, key_bits=ORDERED[mean], value_bits=4)) for mean in (4, 3)
    }
    found |= {f"rank {rank} alone": DKVConfig(rank=rank, num_residuals=0) for rank in (16, 32, 64)}
    found |= {
        "half of the heads K4 V4, others rank 8": tiers(int4, HeadTier(0.5, rank=8, num_residuals=0)),
        "half of the heads K4 V4, others rank 16": tiers(int4, HeadTier(0.5, rank=16, num_residuals=0)),
        "half of the heads K4 V4, others K2 by importance, V2": tiers(
            int4, HeadTier(0.5, key_bits=ORDERED[2.0], value_bits=2)
        ),
        "half of the heads K4 V4, others K1 by importance, V1": tiers(
            int4, HeadTier(0.5, key_bits=ORDERED[1.0], value_bits=1)
        ),
    }
    fitted = (4.0, 5.0, 6.0, 7.0, 8.0, 10.0)
    found |= {
        f"fitted to {ratio:g}x": DKVConfig(rank=0, router="keys", ratio=ratio, profile=profile) for ratio in fitted
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--profile", help="file of dkv profile; the one that ships for the model if unset")
    parser.add_argument("--offsets", default="84000,95000")
    parser.add_argument("--tokens", type=int, default=fidelity.TOKENS)
    parser.add_argument("--json", required=True)
    options = parser.parse_args()
    profile = HeadProfile.load(options.profile) if options.profile else HeadProfile.shipped(options.model)
    model, tokenizer = models.load(options.model)
    rows = fidelity.run(
        model.float(),
        tokenizer,
        options.tokens,
        [int(offset) for offset in options.offsets.split(",")],
        trials=0,
        variants=variants(profile),
        advance=print,
    )
    with open(options.json, "w", encoding="utf-8") as file:
        json.dump(rows, file, indent=2)
    for row in rows:
        print(f"{row['name']:56s} {row['ratio'] or 0:6.2f}x  std {row['std_kl']:.4f}  copy {row['copy_kl']:.4f}")


if __name__ == "__main__":
    main()
