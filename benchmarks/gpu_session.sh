#!/usr/bin/env bash
# Everything that only a GPU can say, in one call of less than ten minutes, on a machine with torch and triton alone.
# Kernels are compiled on all cores; then the headline on the default launches (triangle attention, an Evoformer block, a
# training step), a profile, norms; then launch tables, the other operations; the GPU tests in the time that is left.
#
#   benchmarks/gpu_session.sh             results in $OUT, or in benchmarks/results
#   benchmarks/gpu_session.sh --rehearse  its own logic, on a CPU at toy sizes: no GPU result, nothing is kept
#
# Each part has a box of time; one that fails or runs out is said, and the next one runs.  Figures are written as they
# are measured (*.jsonl), so that a part that is stopped keeps what it has.  Exit code 1 if any part failed.
set -uo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly root
readonly python="${PYTHON:-python3}"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

fail() { printf 'gpu_session: %s\n' "$*" >&2; exit 2; }

rehearse=
case "${1:-}" in
  '') ;;
  --rehearse) rehearse=1 ;;
  -h | --help) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  *) fail "$1: not known; there is --rehearse" ;;
esac
# Seconds of the whole.  A rehearsal has time: toys on a busy CPU may take longer than a GPU takes for the true sizes.
readonly limit=$((rehearse ? 3600 : 565)) patience=$((rehearse ? 10 : 1))
[[ $# -le 1 ]] || fail "$2: one argument at most"

if [[ -n "$rehearse" ]]; then
  out="$(mktemp -d)" || fail "no temporary folder"
  trap 'rm -rf "$out"' EXIT
  readonly name=rehearsal device=cpu
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
readonly log="$out/$name.log"
parts="$(mktemp -d)" || fail "no temporary folder"
trap 'rm -rf "$parts" ${rehearse:+"$out"}' EXIT
: >"$log" || fail "$log: cannot be written"
: >"$parts/began"
failed=0

part() {  # NAME SECONDS FILE COMMAND ...: what the command prints goes to FILE (or, where that is -, to the log)
  local what="$1" box=$(($2 * patience)) file="$3" began="$SECONDS" code left
  shift 3
  left=$((limit - SECONDS))
  if ((left < 10)); then
    printf '%-34s not run: no time is left\n' "$what" | tee -a "$log"
    printf '%s\tnot run\t0\n' "$what" >>"$parts/parts.tsv"
    failed=1
    return
  fi
  ((box > left)) && box="$left"
  printf '\n$ %s\n' "$*" >>"$log"
  if [[ "$file" == - ]]; then
    timeout --kill-after=5 "$box" "$@" >>"$log" 2>&1
  else
    timeout --kill-after=5 "$box" "$@" >"$file" 2>>"$log"
  fi
  code=$?
  local took=$((SECONDS - began)) says
  case "$code" in
    0) says=ok ;;
    124 | 137) says="out of its ${box} s" ;;
    *) says="FAILED, exit code $code: $(tail -n 1 "$log" | cut -c 1-160)" ;;
  esac
  ((code == 0)) || failed=1
  printf '%-34s %s (%d s)\n' "$what" "$says" "$took" | tee -a "$log"
  printf '%s\t%s\t%d\n' "$what" "$says" "$took" >>"$parts/parts.tsv"
}

warpfold=("$python" -m warpfold)
if [[ -n "$rehearse" ]]; then
  triangles=starting:12,starting:16 all=starting:12 places=pair:8,msa:3x8,dropout:8 settings=tiny toy=(--toy)
  sizes=(--residues 12 --sequences 4 --extra 4 --blocks 1) few=() presets=tiny
else
  triangles=starting:256,starting:384,starting:1024,starting:2048,ending:256,ending:1024
  all=starting:256,row:128x256,column:128x256,global:1024x256 places=pair:256,msa:128x256,dropout:256 settings=monomer toy=()
  sizes=() few=(--blocks 4) presets=monomer
fi
readonly tests=("$python" -m pytest -m gpu -q --maxfail=10 --continue-on-collection-errors --no-header tests/ops tests/laws/test_gpu_graphs.py
  tests/test_device.py tests/model/test_permutation.py)
readonly most="definition,sdpa,trifast,cuequivariance,ours"
rm -rf "$out/$name"-{triangles,norms,attention,block,step}.{csv,jsonl} "$out/$name"-{triangles.png,profile}  # earlier today

measure() {  # NAME SECONDS PART ARGUMENTS ...: figures of `warpfold bench`, each in a file as soon as it is measured
  local what="$1" box="$2" part="$3"
  shift 3
  part "$what" "$box" "$parts/$part.json" "${warpfold[@]}" bench "$@" --device "$device" \
    --rows "$out/$name-$part.jsonl" --csv "$out/$name-$part.csv" --json
  cp "$out/$name-$part.jsonl" "$parts/$part.jsonl" 2>>"$log"
}

tune() {  # OPERATIONS SECONDS: into the table that runs look for, of which a copy is kept
  if [[ -n "$rehearse" ]]; then
    part "launches of $1" 60 - "${warpfold[@]}" tune --op "$1" --quick --dry-run
  else
    part "launches of $1" "$2" - "${warpfold[@]}" tune --op "$1" --quick
    find ~/.cache/warpfold/tuned -name '*.json' -newer "$parts/began" -exec cp {} "$out/$name-launches.json" \; 2>>"$log"
  fi
}

plot=()
if "$python" -c 'import matplotlib' 2>/dev/null; then plot=(--plot "$out/$name-triangles.png"); fi
part "machine" 40 - "${warpfold[@]}" doctor --device "$device"
part "kernels compiled ahead" 100 - "$python" benchmarks/gpu_ahead.py --settings "$settings" --shapes "$triangles" \
  --places "$places" ${toy[@]+"${toy[@]}"}
measure "triangle attention" 60 triangles --op attention --shapes "$triangles" --ways "$most" --unchecked \
  ${plot[@]+"${plot[@]}"}
measure "Evoformer block" 60 block --block --settings "$settings" --dtype bf16 --ways definition,openfold,ours \
  ${sizes[@]+"${sizes[@]}"}
measure "training step" 90 step --step --settings "$settings" --ways definition,ours --repeats 5 ${sizes[@]+"${sizes[@]}"}
part "profile of a step" 50 - "${warpfold[@]}" profile "$settings" --device "$device" --out "$out/$name-profile" \
  ${few[@]+"${few[@]}"} ${sizes[@]+"${sizes[@]}"}
measure "norms, gates, tails" 30 norms --op layer_norm,norm_linear,gate,tail --shapes "$places" --ways definition,ours \
  --unchecked
part "every operation of $settings" 45 "$parts/doctor.json" "${warpfold[@]}" doctor --kernels --settings "$settings" \
  --device "$device" --json
part "memory: said and taken" 45 - "$python" -m benchmarks.memory --quick --presets "$presets" --device "$device" \
  --output "$out/$name-memory.json"
tune attention 75
measure "attention, all ways" 40 attention --op attention --shapes "$all" --unchecked
if [[ -n "$rehearse" ]]; then
  part "tests that need a GPU" 60 - "$python" -c 'print("left out: there is none")'
elif "$python" -c 'import pytest, xdist' 2>/dev/null; then  # most of their time is Triton's compiler's, on the CPU
  part "tests that need a GPU" 90 - "${tests[@]}" -n 8 -k 'not (clock or past or memory)'
  part "tests that need all of it" 60 - "${tests[@]}" -k 'clock or past or memory'
elif "$python" -c 'import pytest' 2>/dev/null; then
  part "tests that need a GPU" 120 - "${tests[@]}"
else
  echo "pytest is not installed: the doctor's checks stand for the tests" | tee -a "$log"
fi

echo
"$python" benchmarks/gpu_table.py "$parts" --out "$out/$name.json" ${rehearse:+--rehearsal} | tee -a "$log"
((PIPESTATUS[0] == 0)) || failed=1
if [[ -z "$rehearse" ]]; then
  echo "results: $out/$name*"
fi
exit "$failed"
