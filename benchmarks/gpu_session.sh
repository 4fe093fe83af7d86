#!/usr/bin/env bash
# What only a GPU can say, in three calls of less than ten minutes each, on a machine with torch and triton alone.
#
#   benchmarks/gpu_session.sh 1      correctness (sanitizer, doctor in bf16, graphs), then the headline: an Evoformer
#                                    block, a training step {eager, graph} x {recomputed, kept} x {recycles 0, 3}
#   benchmarks/gpu_session.sh 2      a profile, launch tables, the operations and the headline with them, crop 384
#   benchmarks/gpu_session.sh 3      triangles beside SDPA, inference at 2,048 and 4,096 residues, doctor in fp32, the GPU
#                                    tests, and last the peers that tune themselves
#   benchmarks/gpu_session.sh --rehearse 1|2|3   the same commands on a CPU at toy sizes: no GPU result, nothing is kept
#
# Results are one archive in $OUT, or in benchmarks/results: NAME-call-1.tar.gz, written anew during and after each part,
# so that a call that is killed keeps what it had measured.  No call needs what another left: each compiles its kernels
# and launchers ahead, on all cores.  Each part has a box of time; one that fails or runs out is said, and the next one
# runs.  Exit code 1 if any part failed.
set -uo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly root python="${PYTHON:-python3}"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

fail() { printf 'gpu_session: %s\n' "$*" >&2; exit 2; }

rehearse=
case "${1:-}" in
  --rehearse) rehearse=1; shift ;;
  -h | --help) sed -n '2,16s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
case "${1:-}" in
  1 | 2 | 3) readonly call="$1" ;;
  '') fail "which call? 1, 2 or 3; --rehearse 1 tries it on a CPU; --help says what they do" ;;
  *) fail "$1: not known; there are 1, 2, 3 and --rehearse" ;;
esac
[[ $# -le 1 ]] || fail "$2: one call at a time"
# Seconds of the call, of which the boxes are less together.  A rehearsal has time: a CPU is shared.
readonly limit=570 patience=$((rehearse ? 10 : 1))

files="$(mktemp -d)" || fail "no temporary folder"
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$files"' EXIT
readonly results="$files/results"
mkdir "$results"
if [[ -n "$rehearse" ]]; then
  out="${OUT:-$files}"
  readonly name=REHEARSAL device=cpu
  mkdir "$files/absent"  # as on the machine that is lent
  cat >"$files/absent/sitecustomize.py" <<'PYTHON'
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("gemmi", "pyhmmer", "zstandard"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
PYTHON
  export PYTHONPATH="$files/absent:$PYTHONPATH"
  "$python" -c 'import torch' 2>/dev/null || fail "$python cannot import torch; PYTHON=/path/to/python names another"
  echo "REHEARSAL on a CPU, at toy sizes: not a GPU result."
else
  gpu="$("$python" -c 'import sys, torch
if not torch.cuda.is_available(): sys.exit(3)
print(torch.cuda.get_device_name())' 2>/dev/null)"
  case $? in
    0) ;;
    3) fail "no GPU that torch can use; nothing was run" ;;
    *) fail "$python cannot import torch; PYTHON=/path/to/python names another" ;;
  esac
  out="${OUT:-$root/benchmarks/results}"
  mkdir -p "$out" || fail "$out: cannot be made"
  out="$(cd "$out" && pwd)"
  name="$(tr -cs 'A-Za-z0-9.\n' '-' <<<"$gpu")-$(date +%F)"
  readonly name device=cuda
fi
cd "$root" || fail "$root: not a folder"
readonly archive="$out/$name-call-$call.tar.gz"
failed=0 planning=1 planned=0

keep() {  # write the archive anew; a file that grows meanwhile is in it as far as it was read
  find "$results" -type f -size +6M -print -delete  # too large to come back: said by its name
  tar -C "$files" --warning=no-file-changed -czf "$archive.new" results || (($? == 1)) || return
  mv "$archive.new" "$archive"
}

part() {  # NAME SECONDS COMMAND ...: what the command prints goes to NAME.out and NAME.log
  local what="$1" box="$2" began="$SECONDS" kept="$SECONDS" code left took says
  shift 2
  if [[ -n "$planning" ]]; then
    planned=$((planned + box))
    return
  fi
  left=$((limit * patience - SECONDS)) box=$((box * patience))
  if ((left < 10)); then
    printf '%-28s not run: no time is left\n' "$what"
    printf '%s\tnot run\t0\n' "$what" >>"$results/parts.tsv"
    failed=1
    return
  fi
  ((box > left)) && box="$left"
  printf '$ %s\n' "$*" >"$results/$what.log"
  timeout --kill-after=5 "$box" "$@" >"$results/$what.out" 2>>"$results/$what.log" &
  while kill -0 $! 2>/dev/null; do  # what it measures is kept while it runs
    if ((SECONDS >= kept + 5)); then
      keep
      kept="$SECONDS"
    fi
    sleep 0.2
  done
  wait $!
  code=$? took=$((SECONDS - began))
  case "$code" in
    0) says=ok ;;
    124 | 137) says="out of its ${box} s" ;;
    *) says="FAILED, exit code $code: $(cat "$results/$what".{out,log} | tail -n 1 | cut -c 1-160)" ;;
  esac
  ((code == 0)) || failed=1
  printf '%-28s %s (%d s)\n' "$what" "$says" "$took"
  printf '%s\t%s\t%d\n' "$what" "$says" "$took" >>"$results/parts.tsv"
  keep
}

readonly warpfold=("$python" -m warpfold)

rows() {  # NAME SECONDS ARGUMENTS ...: figures of a command that takes --rows, each on the disk as soon as it is there
  local what="$1" box="$2"
  shift 2
  part "$what" "$box" "$@" --device "$device" --rows "$results/$what.jsonl"
}

step() {  # NAME SECONDS WAYS ARGUMENTS ...: whole training steps
  local what="$1" box="$2" ways="$3"
  shift 3
  rows "$what" "$box" "${warpfold[@]}" bench --step --settings "$preset" --dtype bf16 --ways "$ways" --repeats "$repeats" \
    "$@" ${sizes[@]+"${sizes[@]}"}
}

block() {  # NAME SECONDS WAYS
  rows "$1" "$2" "${warpfold[@]}" bench --block --settings "$preset" --dtype bf16 --ways "$3" ${sizes[@]+"${sizes[@]}"}
}

operations() {  # NAME SECONDS OPERATIONS SHAPES WAYS
  rows "$1" "$2" "${warpfold[@]}" bench --op "$3" --shapes "$4" --ways "$5" --dtype bf16 --unchecked
}

tune() {  # OPERATION SECONDS: into the table that runs look for, of which a copy is kept
  part "launches-$1" "$2" "${warpfold[@]}" tune --op "$1" --quick ${dry[@]+"${dry[@]}"}
  [[ -n "$planning$rehearse" ]] || cp ~/.cache/warpfold/tuned/*.json "$results" 2>/dev/null
}

gpu_tests() {  # NAME SECONDS TESTS ...
  if "$python" -c 'import pytest' 2>/dev/null; then
    part "$1" "$2" "$python" -m pytest -m gpu -q --maxfail=10 --continue-on-collection-errors --no-header \
      -p no:cacheprovider ${collect[@]+"${collect[@]}"} "${@:3}"
  elif [[ -z "$planning" ]]; then
    echo "$1: pytest is not installed"
  fi
}

if [[ -n "$rehearse" ]]; then
  preset=tiny repeats=1 crop=12 large=16 lengths=12,16
  triangles=starting:12,ending:12 products=outgoing:12,incoming:12 pairs=pair:8 deep=msa:3x8 rows_of=row:3x8,column:3x8
  sizes=(--residues 12 --sequences 4 --extra 4 --blocks 1) short=() most=(--most 2) dry=(--dry-run)
  collect=(--collect-only)
else
  preset=monomer repeats=5 crop=256 large=384 lengths=2048,4096
  triangles=starting:256,starting:384,starting:1024,starting:2048,ending:256,ending:1024
  products=outgoing:256,outgoing:384,outgoing:1024,incoming:256 pairs=pair:256,pair:384
  deep=msa:128x256 rows_of=row:128x256,column:128x256
  sizes=() short=(--blocks 4) most=() dry=() collect=()
fi
workers=()
if "$python" -c 'import xdist' 2>/dev/null; then workers=(-n 8); fi  # most of the tests' time is Triton's compiler's
readonly tiny_step='
import torch
from warpfold.cli.bench import measured
from warpfold.cost.example import TrainingStep
device = "cuda" if torch.cuda.is_available() else "cpu"
step = TrainingStep(measured("tiny", ["plan.precision=bf16"], {"residues": 24}, 1, 1), device)
step()
print("loss", float(step.learn().losses[""]))'

call_1() {
  part machine 20 "${warpfold[@]}" doctor --device "$device" --json
  part compiled-ahead 110 "$python" benchmarks/gpu_ahead.py --step "$preset" "$crop" bf16 --step "$preset" "$large" bf16 \
    --step tiny 24 bf16 --step tiny 64 fp32 --graphs --doctor "$preset" bf16 ${most[@]+"${most[@]}"}
  if command -v compute-sanitizer >/dev/null; then
    part sanitizer 45 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 "$python" -c "$tiny_step"
  else
    [[ -n "$planning" ]] || echo "sanitizer: compute-sanitizer is not here; the step runs without it"
    part tiny-step 45 "$python" -c "$tiny_step"
  fi
  rows doctor-bf16 65 "${warpfold[@]}" doctor --kernels --settings "$preset" --dtype bf16
  gpu_tests graphs 75 tests/laws/test_gpu_graphs.py ${workers[@]+"${workers[@]}"}
  block block 45 definition,ours
  step step 50 ours,graph
  step step-kept 50 kept,kept-graph
  step step-recycled 50 ours,graph --recycles 3
  step step-kept-recycled 50 kept,kept-graph --recycles 3
}

call_2() {
  part compiled-ahead 85 "$python" benchmarks/gpu_ahead.py --step "$preset" "$crop" bf16 --step "$preset" "$large" bf16 \
    --op transition "$pairs,$deep" --op outer_product "$deep" --op triangle_multiplication "$products" \
    --op attention "$triangles,$rows_of" ${most[@]+"${most[@]}"}
  part profile 45 "${warpfold[@]}" profile "$preset" --device "$device" --out "$results/profile" \
    ${short[@]+"${short[@]}"} ${sizes[@]+"${sizes[@]}"}
  tune transition 50
  tune outer_product 45
  tune triangle_multiplication 55
  tune attention 75
  operations operations 45 transition,outer_product,triangle_multiplication,attention \
    "$pairs,$deep,$rows_of,$products,starting:$crop" definition,ours
  block block-tuned 35 ours
  step step-tuned 50 definition,ours,graph
  step step-384 45 ours,graph --residues "$large"
}

call_3() {
  part compiled-ahead 75 "$python" benchmarks/gpu_ahead.py --step tiny 64 fp32 --doctor "$preset" fp32 --op attention "$triangles" \
    --op triangle_multiplication "$products" ${most[@]+"${most[@]}"}
  operations triangle-attention 60 attention "$triangles" sdpa,ours
  operations triangle-multiplication 25 triangle_multiplication "$products" definition,ours
  rows inference 160 "$python" -m benchmarks.gpu_fold --settings "$preset" --residues "$lengths" --plans whole,in-place
  rows doctor-fp32 70 "${warpfold[@]}" doctor --kernels --settings "$preset" --dtype fp32
  gpu_tests tests 85 tests/ops tests/test_device.py tests/model/test_permutation.py ${workers[@]+"${workers[@]}"}
  for peer in trifast cuequivariance; do
    operations "peer-$peer" 20 attention "$triangles" "$peer"
  done
  operations peer-compile 40 attention,triangle_multiplication "starting:$crop,outgoing:$crop" compile
}

"call_$call"
((planned < limit)) || fail "the boxes of call $call are $planned s, and it has $limit"
planning=
"call_$call"
echo
"$python" benchmarks/gpu_table.py "$results" ${rehearse:+--rehearsal}
(($? == 0)) || failed=1
if [[ -n "$rehearse" ]]; then
  echo "REHEARSAL: not a GPU result; nothing is kept."
  rm -f "$archive"
else
  keep
  echo "results: $archive"
fi
exit "$failed"
