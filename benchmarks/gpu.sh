#!/usr/bin/env bash
# benchmarks/gpu.py on the GPU of this machine, in less than 8 minutes; arguments are its own. Not run on a GPU yet.
#
#   benchmarks/gpu.sh                       with the Python of PATH (PYTHON= names another)
#   WHEELS=folder benchmarks/gpu.sh         where only torch, transformers, peft and accelerate are installed: the rest
#                                           is unpacked from the wheels of a folder, made on a machine with a network by
#     pip wheel -w folder --no-deps hydra-core omegaconf antlr4-python3-runtime==4.9.3 pydantic pydantic-core \
#         annotated-types typing-inspection rich markdown-it-py mdurl pygments xxhash bitsandbytes torchao
#
# Results: build/gpu.json and build/gpu.md; exit code 1 where no part could be run.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
path=$root/src
if [ -n "${WHEELS:-}" ]; then
    unpacked=$(mktemp -d)
    trap 'rm -rf "$unpacked"' EXIT
    for wheel in "$WHEELS"/*.whl; do
        "$python" -m zipfile -e "$wheel" "$unpacked"
    done
    path=$path:$unpacked
fi
PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} "$python" "$root/benchmarks/gpu.py" "$@"
