#!/bin/sh
# Run this in the repository's folder: it does what is owed on a GPU. Its options are those of
# `python -m scripts.gpu`, whose --pack has put it beside what it reads. What comes with it is
# installed outside the repository.
set -e
here=$(cd "$(dirname "$0")" && pwd)
test -f scripts/gpu.py || { echo "run this in the repository's folder" >&2; exit 2; }
wheels=$(ls "$here/wheels" | sha256sum | cut -c 1-12)
site="${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/from-attention-to-translation/wheels-$wheels"
if [ ! -d "$site" ]; then
  rm -rf "$site.partial"
  python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
    --target "$site.partial" "$here"/wheels/*.whl
  mv "$site.partial" "$site"
fi
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
export MULTI30K_DIR="$here/corpus"
export SERIES_COMMIT="$(cat "$here/commit")"
export PYTHONUNBUFFERED=1 TQDM_MININTERVAL=30  # what is said is seen; bars say little
exec python3 -m scripts.gpu "$@"
