#!/usr/bin/env bash
# Parity, then times, on the GPU of this machine: bash bench/gpu.sh [FOLDER] [arguments of bench.gpu...]
# Writes FOLDER/gpu.json and FOLDER/gpu.txt. Needs torch, triton, numpy, ml_dtypes and rich; installs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
folder=${1:-.}
shift || true
mkdir -p "$folder"

python=${PYTHON:-python3}
links=$(mktemp -d) # dkv as it is installed, without installing it
trap 'rm -rf "$links"' EXIT
mkdir "$links/dkv"
ln -s "$root"/dkv/* "$links/dkv/"
ln -s "$root/reference" "$root/kernels" "$links/dkv/"

export PYTHONPATH="$links:$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1
export TRITON_DEFAULT_FP_FUSION="${TRITON_DEFAULT_FP_FUSION:-1}"
"$python" -m bench.gpu --json "$folder/gpu.json" "$@" 2>&1 | tee "$folder/gpu.txt"
