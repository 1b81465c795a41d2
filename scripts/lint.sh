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

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
checks=(${*:-ruff format mypy imports buf breaking protos})
pids=()
for check in "${checks[@]}"; do # beside each other: mypy takes longer than all the others
    step "$check" >"$logs/$check" 2>&1 &
    pids+=($!)
done
for i in "${!checks[@]}"; do
    check=${checks[i]}
    if wait "${pids[i]}"; then
        echo "ok    $check"
    else
        printf 'FAIL  %s\n%s\n' "$check" "$(<"$logs/$check")"
        failed+=("$check")
    fi
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" && exit 1; }
