#!/usr/bin/env bash
# The two-node default workload, all modes, both directions, in one folder. Started on every node at about the same time:
#   NNODES=2 NPROC=8 NODE_RANK=<this node's> MASTER_ADDR=<IP of node 0> bash scripts/cross_kit.sh OUT
#     [--dry-run] [--cpu] [--only NAME,NAME...]
#
# First what is there and what is wrong (compile_overlap.topology, preflight.py --target cluster): nothing else runs where
# the preflight fails. Then the commands that the assignment prints, with their checks, none, with-sm, sm-free, kernel and
# kernel:peers in one comparison each, compiled and not, forward and backward, payload and computation doubled, and a trace.
# The nodes meet before every step, so that one that fails on a node does not shift the others. Node r's OUT gets
# table.log and results.tar.gz.0 and so on; records are node 0's.
#
# MASTER_PORT (29500) and the port after it must be open on node 0, and all ports between the nodes. $BUDGET (3600) seconds
# in all. $PYTHON (default as run_prod_cross.sh finds it) must hold torch, triton and numpy. CLUSTER.md says more.
#
#   --dry-run   print the commands
#   --cpu       the same steps by gloo with a tiny shape, to see that each works (no traces)
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
here=$root/research_topic_2
usage="usage: NNODES=2 NPROC=8 NODE_RANK=0 MASTER_ADDR=IP cross_kit.sh OUT [--dry-run] [--cpu] [--only NAME,NAME...]"
case ${1:-} in
  -h | --help) echo "$usage"; exit 0 ;;
  "" | -*) echo "$usage" >&2; exit 2 ;;
esac
out=$1
: "${NODE_RANK:?$usage}" "${MASTER_ADDR:?$usage}"
shift
dry_run=0 cpu=0 only=""
while (($#)); do
  case $1 in
    --dry-run) dry_run=1 ;;
    --cpu) cpu=1 ;;
    --only) only=${2:?$usage}; shift ;;
    *) echo "$usage" >&2; exit 2 ;;
  esac
  shift
done
export NNODES=${NNODES:-2} NPROC=${NPROC:-8} NODE_RANK MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500}
budget=${BUDGET:-3600} patience=1
work=WORK
if ((!dry_run)); then
  out=$(mkdir -p "$out" && cd "$out" && pwd)
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
fi
source "$root/scripts/steps.sh"
source "$here/scripts/environment.sh"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

small="--batch-size 4 --tokens 16 --dim 128 --k 2" shape="" common="--warmup 5 --num-tests 20 --rounds 4"
long="--warmup 10 --num-tests 100" device="--device cuda"
if ((cpu)); then
  budget=${BUDGET:-7200} patience=10
  device="--device cpu" common="--warmup 1 --num-tests 4 --rounds 2" long="--warmup 1 --num-tests 4"
  shape="$device --no-l2-flush --batch-size 2 --tokens 16 --dim 128 --k 2" small="$shape"
  export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 CUDA_VISIBLE_DEVICES=
fi
modes=none,with-sm,sm-free,kernel,kernel:peers
checked="--check-correctness approx --full-batch-check"
torchrun="$PYTHON -m torch.distributed.run --nnodes $NNODES --nproc-per-node $NPROC --node-rank $NODE_RANK"
torchrun+=" --master-addr $MASTER_ADDR --master-port $MASTER_PORT"

meet() { # until all nodes are here, a quarter of an hour at most
  ((dry_run)) || "$PYTHON" - <<'PYTHON' || { echo "error: not all $NNODES nodes met within 15 minutes" >&2; exit 1; }
import os
from datetime import timedelta
from torch.distributed import TCPStore

rank, nodes, port = (int(os.environ[name]) for name in ("NODE_RANK", "NNODES", "MASTER_PORT"))
TCPStore(os.environ["MASTER_ADDR"], port + 1, nodes, rank == 0, timedelta(minutes=15))
PYTHON
}

both() { # name, limit, command...: the step on all nodes
  meet
  step "$@"
}

compare() { # name, limit, modes, flags...
  local name=$1 limit=$2 which=$3
  shift 3
  both "$name" "$limit" $torchrun "$here/compare.py" $shape $common --modes "$which" "$@" --json "$work/$name.json"
}

printed() { # name, flags...: the command that the assignment prints
  local name=$1
  shift
  both "$name" 300 bash "$here/scripts/run_prod_cross.sh" "$@" --json "$work/$name.json"
}

trace() { # name, flags...
  local name=$1
  shift
  ((cpu)) || both "$name" 200 $torchrun "$root/scripts/trace_overlap.py" --warmup 5 --modes kernel,kernel:peers "$@" \
    --output "$work/$name"
}

both topology 120 $torchrun -m compile_overlap.topology --json "$work/topology.json"
tokens=64
((cpu)) && tokens=16
both preflight 180 $torchrun "$here/preflight.py" --target cluster --tokens $tokens $device || {
  cat "$work/preflight.log"
  exit 1
}
printed small_none $small --overlap none
printed small_kernel $small --overlap kernel --check-correctness approx
printed small_backward $small --overlap kernel --backward --check-correctness approx
compare default 400 $modes $checked
compare default_eager 300 $modes --no-compile $checked
compare default_backward 500 $modes --backward $checked
compare default_eager_backward 300 $modes --no-compile --backward $checked
printed none $shape $long --overlap none
printed kernel $shape $long --overlap kernel
printed backward $shape $long --overlap kernel --backward --check-correctness approx
compare near_first 200 none,kernel:peers,kernel:TRANSPORT=peers+OWN_FIRST=1,kernel:chunks=1,kernel:chunks=2
compare comm2 200 none,kernel,kernel:peers --comm-scale 2
compare compute2 200 none,kernel,kernel:peers --compute-scale 2
trace traces
trace traces_backward --backward
exit $failed
