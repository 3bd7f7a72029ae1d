#!/usr/bin/env bash
# Measure on a GPU what docs/performance.md leaves open, in at most twelve minutes.
#
#     benchmarks/gpu.sh OUT              # writes JSON files and logs to the folder OUT
#     benchmarks/gpu.sh --dry-run OUT    # the same commands on the CPU, as short as they can be
#
# Needs MNIST and CIFAR-10 in DPMAC_DATA_DIR, and Opacus for the columns of others. With two GPUs the last
# part measures one run on both of them (NCCL). A part that fails does not stop the others; the exit code is 1 then. A part
# that is done is not run again for the same OUT. The last lines say which bounds are kept (OUT/checks.json).
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
    if [ -e "$out/$name.done" ]; then return; fi
    echo "== $name: $*"
    if timeout "$limit" "$@" > "$out/$name.log" 2>&1; then
        touch "$out/$name.done"
    else
        echo "   failed: $out/$name.log"
        failed=1
    fi
}

if [ -n "$dry" ]; then
    step=(--quick --rounds 2 --warm 0.1 --no-peers --batch 4 --only dp-adam,dp-macadam)
    deep=(mlp) run=(--steps 2) text=(--layers 1 --width 32 --words 50 --records 2000)
else
    step=(--quick --rounds 5 --warm 0.5)
    deep=(wrn-16-4 resnet18 vit-tiny) run=() text=(--physical-batch 256)
    nvidia-smi > "$out/nvidia-smi.txt"
fi

part step_time 100 python benchmarks/step_time.py --device $device --model mlp cnn "${step[@]}" --json "$out/step_time.json"
part deep 220 python benchmarks/step_time.py --device $device --model "${deep[@]}" "${step[@]}" --json "$out/deep.json"
part tests 180 python -m pytest -q tests/test_cuda.py
part lora 60 python benchmarks/language_model.py --device $device --steps 8 --public 20 "${text[@]}"
part mnist 40 dpmac train --dataset mnist --sigma 0.8 --device $device --seed 0 --out "$out/mnist" --force "${run[@]}"
part secure 40 dpmac train --dataset mnist --sigma 0.8 --device $device --secure --out "$out/secure" --force "${run[@]}"
part cifar10 80 dpmac train --dataset cifar10 --sigma 0.8 --device $device --seed 0 --out "$out/cifar10" --force "${run[@]}"
if [ -z "$dry" ] && [ "$(nvidia-smi -L | wc -l)" -ge 2 ]; then
    part two_gpus 120 torchrun --nproc-per-node 2 -m dpmac_cli train --dataset cifar10 --sigma 0.8 --device cuda --out "$out/two" --force
fi
python benchmarks/gpu_checks.py "$out" || [ -n "$dry" ] || failed=1
echo "== done: $out"
exit $failed
