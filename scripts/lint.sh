#!/usr/bin/env bash
# All static checks, or those named: ruff format mypy imports buf breaking protos. Runs all of them before it fails.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${VENV:-.venv}/bin
failed=()

breaking() {
    # Against the commit before; a shallow clone or an archive has none.
    if git cat-file -e HEAD~1:buf.yaml 2>/dev/null; then
        "$bin/buf" breaking --against '.git#ref=HEAD~1'
    else
        echo "no earlier commit with protos to compare with"
    fi
}

step() {
    case $1 in
        ruff) "$bin/ruff" check . ;;
        format) "$bin/ruff" format --check . ;;
        mypy) "$bin/mypy" ;;
        imports) "$bin/lint-imports" ;;
        buf) "$bin/buf" lint && "$bin/buf" format --diff --exit-code ;;
        breaking) breaking ;;
        protos) scripts/protos.sh --check ;;
        *) echo "unknown check $1" && return 2 ;;
    esac
}

for name in "${@:-ruff format mypy imports buf breaking protos}"; do
    for check in $name; do
        if output=$(step "$check" 2>&1); then
            echo "ok    $check"
        else
            printf 'FAIL  %s\n%s\n' "$check" "$output"
            failed+=("$check")
        fi
    done
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" && exit 1; }
