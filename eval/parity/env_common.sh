# Shared by setup_vllm.sh and setup_speculators.sh (sourced, not run).
#
# A parity environment is a virtual environment of its own: the programs pin versions of torch and
# transformers that differ from draftlab's, and one of their requirements (torchvision) replaces a
# CPU build of torch by a CUDA one.
#
# Settings, all optional:
#   DRAFTLAB_ENVS         folder of the environments (default: .envs at the repository root)
#   DRAFTLAB_PYTHON       interpreter to build with (default: python3.11, else python3)
#   DRAFTLAB_TORCH_INDEX  extra package index that serves CPU builds of torch, where pip's own
#                         configuration has none

parity_repo_root() {
  (cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
}

parity_die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# parity_env_dir NAME -> absolute path of that environment
parity_env_dir() {
  local base="${DRAFTLAB_ENVS:-.envs}"
  case "$base" in
    /*) ;;
    *) base="$(parity_repo_root)/$base" ;;
  esac
  printf '%s/%s\n' "$base" "$1"
}

parity_python() {
  local candidate
  for candidate in "${DRAFTLAB_PYTHON:-}" python3.11 python3; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1; then
      if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))'; then
        printf '%s\n' "$candidate"
        return 0
      fi
    fi
  done
  return 1
}

# parity_is_ready DIR WANTED -> true when DIR was finished by a run that wanted the same versions
parity_is_ready() {
  [ -x "$1/bin/python" ] && [ -f "$1/.draftlab-stamp" ] &&
    [ "$(sed -n 's/^wanted: //p' "$1/.draftlab-stamp")" = "$2" ]
}

# parity_begin NAME WANTED [--check] -> sets dir; ends the script when the environment is ready, or
# with --check in any case
parity_begin() {
  dir="$(parity_env_dir "$1")"
  if parity_is_ready "$dir" "$2"; then
    echo "ready: $dir ($2)" >&2
    exit 0
  fi
  if [ "${3:-}" = --check ]; then
    parity_die "not installed: $dir with $2; run eval/parity/setup_$1.sh"
  fi
}

# parity_new_env DIR -> an empty environment at DIR (a half-made one is replaced)
parity_new_env() {
  local python
  python="$(parity_python)" ||
    parity_die "expected Python 3.11 to 3.14, found none; install one or set DRAFTLAB_PYTHON"
  mkdir -p "$(dirname "$1")" || parity_die "cannot create $(dirname "$1"); set DRAFTLAB_ENVS"
  "$python" -m venv --clear "$1" || parity_die "$python -m venv failed (is its venv module there?)"
}

# parity_pip DIR WHAT ARGS... -> pip install, with one readable line when it fails
parity_pip() {
  local dir="$1" what="$2"
  shift 2
  local index=()
  if [ -n "${DRAFTLAB_TORCH_INDEX:-}" ]; then
    index=(--extra-index-url "$DRAFTLAB_TORCH_INDEX")
  fi
  echo "installing $what" >&2
  "$dir/bin/python" -m pip install -qq --disable-pip-version-check "${index[@]}" "$@" ||
    parity_die "could not install $what (pip's reason is above). No network, or no wheel for this" \
      "Python/platform? Parity tests that need this environment are skipped without it."
}

# parity_requirements DIR DISTRIBUTION SKIP -> the distribution's own requirements on this machine,
# one a line, without extras and without the names in the regular expression SKIP
parity_requirements() {
  "$1/bin/python" - "$2" "$3" <<'PY'
import importlib.metadata
import re
import sys

from pip._vendor.packaging.requirements import Requirement

for line in importlib.metadata.requires(sys.argv[1]) or []:
    requirement = Requirement(line)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        continue
    if re.fullmatch(sys.argv[2], requirement.name.lower().replace("_", "-")):
        continue
    print(f"{requirement.name}{'[' + ','.join(requirement.extras) + ']' if requirement.extras else ''}"
          f"{requirement.specifier}")
PY
}

# parity_check_cpu_torch DIR VERSION -> dies unless torch is that version and a CPU build
parity_check_cpu_torch() {
  local found
  found="$("$1/bin/python" -c 'import torch; print(torch.__version__, torch.version.cuda)')" ||
    parity_die "torch does not import in $1; remove that folder and run this again"
  case "$found" in
    "$2 None" | "$2+cpu None") ;;
    *) parity_die "expected a CPU build of torch $2, found '$found' (version, CUDA version); set" \
      "DRAFTLAB_TORCH_INDEX to an index that serves CPU builds, and run this again" ;;
  esac
}

# parity_end WANTED PACKAGES... -> writes the stamp of dir (what was wanted, what is there), prints it
parity_end() {
  local wanted="$1"
  shift
  {
    echo "wanted: $wanted"
    "$dir/bin/python" - "$@" <<'PY'
import importlib.metadata
import platform
import sys

print(f"python=={platform.python_version()}")
for name in sys.argv[1:]:
    print(f"{name}=={importlib.metadata.version(name)}")
PY
  } >"$dir/.draftlab-stamp.tmp" || parity_die "a package is missing from $dir (reason above)"
  mv "$dir/.draftlab-stamp.tmp" "$dir/.draftlab-stamp"
  echo "built: $dir" >&2
  cat "$dir/.draftlab-stamp" >&2
}
