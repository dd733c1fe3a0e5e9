#!/usr/bin/env bash
# Makes the submission: a ZIP of the last commit, complete by scripts/submission_manifest.txt. Fails naming what is missing.
#   bash scripts/package_submission.sh [OUT.zip]      default: build/submission.zip
# It holds code, configurations, launch commands, correctness logs, raw timings, traces, proposal and report. The same commit
# gives the same bytes. $PYTHON (default: A2A_VENV's, or python3) makes it; with the `report` extra it also says whether the report is stale.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
case ${1:-} in
  -h | --help) sed -n '2,/^set/s/^# //p' "$0"; exit 0 ;;
  -*) echo "error: $1: must be the ZIP file to write" >&2; exit 2 ;;
esac
out=${1:-$root/build/submission.zip}
python=${PYTHON:-${A2A_VENV:+$A2A_VENV/bin/}python3}
if [[ ! -e $root/.git ]]; then
  echo "error: $root is no git checkout; the submission is made of a commit" >&2
  exit 2
fi
commit=$(git -C "$root" rev-parse HEAD)
[[ -z $(git -C "$root" status --porcelain) ]] || echo "note: uncommitted changes are not in the submission"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git -C "$root" archive --format=tar --prefix=compile-overlap/ "$commit" | tar -x -C "$work"
tree=$work/compile-overlap

missing=0
while read -r line; do
  [[ -n $line && $line != \#* ]] || continue
  kind=${line%%  *}
  read -ra patterns <<<"${line#"$kind"}"
  for pattern in "${patterns[@]}"; do
    if ! compgen -G "$tree/$pattern" >/dev/null; then
      echo "error: $kind: nothing matches $pattern" >&2
      missing=1
    fi
  done
done <"$tree/scripts/submission_manifest.txt"
((missing == 0)) || exit 1

if "$python" -c 'import jinja2, markdown_it, matplotlib, torch' 2>/dev/null; then
  "$python" "$tree/scripts/report.py" --check
else
  echo "note: $python lacks the report extra; whether the report is stale was not checked"
fi

mkdir -p "$(dirname "$out")"
"$python" - "$work" "$out" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

work, out = map(Path, sys.argv[1:])
files = sorted(path for path in work.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
    for path in files:
        entry = zipfile.ZipInfo(str(path.relative_to(work)), date_time=(1980, 1, 1, 0, 0, 0))
        entry.compress_type, entry.create_system = zipfile.ZIP_DEFLATED, 3
        entry.external_attr = (0o100755 if path.stat().st_mode & 0o100 else 0o100644) << 16
        archive.writestr(entry, path.read_bytes())
print(f"{out}: {len(files)} files, {out.stat().st_size / 2**20:.1f} MiB")
PYTHON
echo "commit $commit, sha256 $(sha256sum "$out" | cut -d' ' -f1)"
