"""``dkv fidelity`` by another name: ``python bench/fidelity.py ...``."""

import sys

from dkv.cli import main

if __name__ == "__main__":
    sys.exit(main(["fidelity", *sys.argv[1:]]))
