#!/usr/bin/env bash
# Measure on a GPU what docs/performance.md leaves open, in about fifteen minutes.
#
#     benchmarks/gpu.sh OUT              # writes JSON files and logs to the folder OUT
#     benchmarks/gpu.sh --dry-run OUT    # the same commands on the CPU, as short as they can be
#
# Needs MNIST and CIFAR-10 in DPMAC_DATA_DIR, and Opacus for the columns of others. With two GPUs the last
# part measures one run on both of them (NCCL). A part that fails does not stop the others; the exit code is 1 then.
set -uo pipefail
cd "$(dirname "$0")/.."

device=cuda dry=""
if [ "${1:-}" = --dry-run ]; then device=cpu dry=yes; shift; fi
out=${1:?"name the folder to write to"}
mkdir -p "$out"
failed=0

part() {  # NAME SECONDS COMMAND...
    local name=$1 limit=$2
    shift 2
    echo "== $name: $*"
    if ! timeout "$limit" "$@" > "$out/$name.log" 2>&1; then
        echo "   failed: $out/$name.log"
        failed=1
    fi
}

if [ -n "$dry" ]; then
    step=(--quick --rounds 2 --no-peers --batch 4 --only dp-adam,dp-macadam)
    deep=(wrn-16-4) run=(--steps 2)
else
    step=(--quick --rounds 5 --warm 0.5)
    deep=(wrn-16-4 resnet18 vit-tiny) run=()
    nvidia-smi > "$out/nvidia-smi.txt"
fi

part step_time 120 python benchmarks/step_time.py --device $device --model mlp cnn "${step[@]}" --json "$out/step_time.json"
part deep 300 python benchmarks/step_time.py --device $device --model "${deep[@]}" "${step[@]}" --json "$out/deep.json"
part mnist 60 dpmac train --dataset mnist --device $device --seed 0 --out "$out/mnist" --force "${run[@]}"
part secure 60 dpmac train --dataset mnist --device $device --secure --out "$out/secure" --force "${run[@]}"
part cifar10 120 dpmac train --dataset cifar10 --device $device --seed 0 --out "$out/cifar10" --force "${run[@]}"
part tests 300 python -m pytest -q tests/test_cuda.py
if [ -z "$dry" ] && [ "$(nvidia-smi -L | wc -l)" -ge 2 ]; then
    part two_gpus 120 torchrun --nproc-per-node 2 -m dpmac_cli train --dataset cifar10 --device cuda --out "$out/two" --force
fi
echo "== done: $out"
exit $failed
