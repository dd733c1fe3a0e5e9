#!/usr/bin/env bash
# The assignment's default workload on the eight GPUs of one host, within ten minutes:
#   eight_gpus.sh OUT [--dry-run] [--cpu] [--only NAME,NAME...]
#
# The most important first: the link, the public cases on two GPUs, then P=8: none, with-sm, sm-free, kernel by
# both transports, compiled and not, forward and backward, checked, the full batch compared bit for bit; what ran beside what;
# the assignment's own commands; payload and computation doubled; P=4, compiled beside eager on the other four GPUs; all
# candidates of the planner, uneven chunks among them, beside its choice; last a table of each latency beside the simulated
# one. A step that does not fit into what is left of $BUDGET (560) seconds is skipped and named: `--only` runs it later. OUT
# gets table.log and results.tar.gz.0 and so on: every step's log, records with all ranks' raw samples and the plan of each
# mode, traces of rank 0 with the figures of all.
#
#   --dry-run   print the commands
#   --cpu       the same steps on four gloo processes with a tiny shape, to see that each works (no traces)
#
# With A2A_SHARE_GPUS=1 (see research_topic_2/ENVIRONMENT.md) ranks share the GPUs that are there: the checks count, times do
# not, and few calls are made.
#
# NVLink multicast stays off. $PYTHON (default python3) must hold torch, triton and numpy.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
usage="usage: eight_gpus.sh OUT [--dry-run] [--cpu] [--only NAME,NAME...]"
case ${1:-} in
  "") echo "$usage" >&2; exit 2 ;;
  -h | --help) echo "$usage"; exit 0 ;;
  -*) echo "$usage" >&2; exit 2 ;;
esac
out=$1
shift
dry_run=0 cpu=0 only=""
while (($#)); do
  case $1 in
    --dry-run) dry_run=1 ;;
    --cpu) cpu=1 ;;
    --only) only=${2:?$usage}; shift ;;
    -h | --help) echo "$usage"; exit 0 ;;
    *) echo "$usage" >&2; exit 2 ;;
  esac
  shift
done
if ((!dry_run && !cpu)) && ! nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
  echo "eight_gpus.sh: no GPU was found: --cpu runs the steps without, --dry-run prints them" >&2
  exit 2
fi
budget=${BUDGET:-560} patience=1
python=${PYTHON:-python3}
work=WORK
if ((!dry_run)); then
  out=$(mkdir -p "$out" && cd "$out" && pwd)
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
fi
source "$root/scripts/steps.sh"

export PYTHON=$python PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
all=8 half=4 shape="" sizes="" common="--warmup 5 --num-tests 20 --rounds 4" long="--warmup 10 --num-tests 100"
if [[ ${A2A_SHARE_GPUS:-} == 1 ]]; then common="--warmup 1 --num-tests 2 --rounds 1" long="--warmup 1 --num-tests 2"; fi
if ((cpu)); then
  budget=${BUDGET:-7200} patience=10
  all=4 half=2 common="--warmup 1 --num-tests 4 --rounds 2" long="--warmup 1 --num-tests 4"
  sizes="--batch-size 2 --tokens 16 --dim 128 --k 2" shape="--device cpu --no-l2-flush"
  export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 CUDA_VISIBLE_DEVICES= GLOO_SOCKET_IFNAME=lo
fi
nccl=kernel:TRANSPORT=collectives # kernel alone goes through the peers' memory where it can
modes=none,with-sm,sm-free,kernel,$nccl
checked="--check-correctness approx --full-batch-check"

torchrun() { echo "$python -m torch.distributed.run --standalone --nproc-per-node $1"; }

compare() { # name, limit, ranks, modes, flags...
  local name=$1 limit=$2 ranks=$3 which=$4
  shift 4
  step "$name" "$limit" $(torchrun "$ranks") "$root/research_topic_2/compare.py" $shape $sizes $common --modes "$which" "$@" \
    --json "$work/$name.json"
}

assigned() { # name, flags...: a command as the assignment prints it
  local name=$1
  shift
  step "$name" 90 env NPROC=$all bash "$root/research_topic_2/scripts/run_prod_local.sh" $shape $sizes $long "$@" \
    --json "$work/$name.json"
}

trace() { # name, flags...
  local name=$1
  shift
  ((cpu)) || step "$name" 75 $(torchrun $all) "$root/scripts/trace_overlap.py" --warmup 5 --modes kernel,$nccl "$@" \
    --output "$work/$name"
}

side_by_side() { # name of the compiled run on the first GPUs, of the eager one on the others, limit, flags...
  local compiled=$1 eager=$2 limit=$3 first=0,1,2,3 second=4,5,6,7
  shift 3
  ((cpu)) && first="" second=""
  [[ ${A2A_SHARE_GPUS:-} == 1 ]] && second=$first
  (export CUDA_VISIBLE_DEVICES=$first; compare "$compiled" "$limit" $half $modes $checked "$@") &
  (export CUDA_VISIBLE_DEVICES=$second; compare "$eager" "$limit" $half $modes --no-compile $checked "$@") || failed=1
  wait $! || failed=1
}

step link 60 $(torchrun $all) -m compile_overlap.topology --json "$work/topology.json"
if ((cpu)); then step public_check 120 "$python" "$root/research_topic_2/public_check.py" --device cpu --json "$work"
else
  step nvlink 20 bash -c 'nvidia-smi topo -m; nvidia-smi nvlink --status'
  step public_check 120 env CUDA_VISIBLE_DEVICES=0,1 "$python" "$root/research_topic_2/public_check.py" --json "$work"
fi
compare p8 150 $all $modes $checked
compare p8_eager 100 $all $modes --no-compile $checked
compare p8_eager_backward 100 $all $modes --no-compile --backward $checked
compare p8_backward 180 $all $modes --backward $checked
trace traces
assigned assigned_none --overlap none
assigned assigned_kernel --overlap kernel
assigned assigned_backward --overlap kernel --backward --check-correctness approx
compare p8_comm2 75 $all none,kernel,$nccl --comm-scale 2
compare p8_compute2 75 $all none,kernel,$nccl --compute-scale 2
side_by_side p4 p4_eager 90
side_by_side p4_backward p4_eager_backward 120 --backward
if wanted p8_chunks; then
  compare p8_chunks 105 $all "$("$python" "$root/scripts/simulate.py" --ranks $all $sizes --modes)"
fi
trace traces_backward --backward
budget=$((SECONDS + 20 * patience)) step simulated 20 "$python" "$root/scripts/calibrate.py" --predict "$work"
exit $failed
