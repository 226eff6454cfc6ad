#!/usr/bin/env bash
# setup.sh base|test|lint: a virtual environment in .venv with Octavo in it, and the extra of that
# name. Leaves the stamp .venv/.NAME that the Makefile waits for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH_RANGE="torch>=2.11,<2.15"
TORCH_CPU="torch==2.13.0+cpu"
TORCH_PLAIN="torch==2.13.0"
TRITON="triton==3.6.0" # interprets our GPU kernels in tests; PyTorch's CPU build brings none
TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"
LOG=.venv/setup.log

say() { printf '%s\n' "$*" >&2; }

die() {
  say "make: $1"
  say "      On Debian or Ubuntu: sudo apt-get install $2"
  exit 1
}

# The first Python that is new enough, wherever it is.
find_python() {
  local candidate
  for candidate in "${PYTHON:-python3}" python3.{11..14} python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
}

make_venv() {
  local python version
  command -v git >/dev/null || die "git is missing." git
  python=$(find_python)
  [ -n "$python" ] || die "there is no Python 3.11 or newer." "python3 python3-venv"
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "Python $version has no venv." "python$version-venv"
  say "Setting up .venv with Python $version"
  "$python" -m venv .venv
}

# pip install "$@": everything goes to the log; a terminal sees its latest line of interest.
pip_install() {
  local start=$SECONDS pid
  .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off "$@" \
    >>"$LOG" 2>&1 &
  pid=$!
  while [ -t 2 ] && kill -0 "$pid" 2>/dev/null; do
    printf '\r\033[K  %3d s  %.90s' "$((SECONDS - start))" \
      "$(grep -E '^ *(Downloading|Installing|Preparing)' "$LOG" | tail -1)" >&2
    sleep 0.5
  done
  [ ! -t 2 ] || printf '\r\033[K' >&2
  wait "$pid"
}

step() {
  local start=$SECONDS name=$1
  shift
  say "  $name …"
  "$@" || {
    grep -E '^(ERROR|error)' "$LOG" | tail -5 >&2 || true
    say "make: could not install $name; the whole story is in $LOG"
    exit 1
  }
  say "  $name: $((SECONDS - start)) s"
}

has_gpu() { [ -e /proc/driver/nvidia/version ]; }

has_torch() {
  .venv/bin/python - 2>/dev/null <<'PYTHON'
import sys
from importlib.metadata import version
sys.exit(not (2, 11) <= tuple(map(int, version("torch").split(".")[:2])) < (2, 15))
PYTHON
}

# Without a GPU the CPU build, a tenth of the size of the CUDA build.
install_torch() {
  if has_gpu; then
    pip_install "$TORCH_RANGE"
  else
    pip_install "$TORCH_CPU" ||
      pip_install --timeout 15 --retries 1 --extra-index-url "$TORCH_CPU_INDEX" "$TORCH_CPU" ||
      pip_install "$TORCH_PLAIN"
  fi
}

# Octavo itself in place, with the dependencies of one extra. "compat" puts the folder on Python's
# path: an import hook would lose to a folder named octavo, the clone itself, where a script runs.
install_octavo() {
  pip_install "setuptools>=77" &&
    pip_install --no-build-isolation --config-settings editable_mode=compat -e ".$1"
}

case $1 in base | test | lint) ;; *) say "usage: scripts/setup.sh base|test|lint"; exit 2 ;; esac
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
[ -x .venv/bin/python ] && .venv/bin/python -m pip --version >/dev/null 2>&1 || make_venv
: >"$LOG"
# First, whatever is asked for: left to pip, PyTorch would be the newest CUDA build.
has_torch || step "PyTorch$(has_gpu || echo ' (CPU build)')" install_torch
case $1 in
  base) step "Octavo and its libraries" install_octavo "" ;;
  test)
    step "the test tools" install_octavo "[test]"
    has_gpu || [ "$(uname -sm)" != "Linux x86_64" ] || step "Triton's interpreter" pip_install "$TRITON"
    ;;
  lint) step "the lint tools" install_octavo "[lint]" ;;
esac
touch ".venv/.$1"
