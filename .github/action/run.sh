#!/usr/bin/env bash
# What action.yml runs: records, then makes the baseline of a push, or judges a pull request by one.
set -euo pipefail

if [[ ! "$NAME" =~ ^[A-Za-z0-9_-]+$ ]]; then
  echo "::error title=stepsplit::name: letters, digits, - and _ alone, not '$NAME'"
  exit 2
fi
read -ra recordings <<<"$RECORDINGS"
if [[ -n "$COMMAND" ]]; then
  for run in $(seq "$RUNS"); do
    # A shell reads the command as it does in a workflow's own step. Each run has a folder of its own.
    stepsplit record --out "stepsplit-runs/$run" -- bash -euo pipefail -c "$COMMAND"
    recordings+=("stepsplit-runs/$run")
  done
fi
if ((${#recordings[@]} == 0)); then
  echo "::error title=stepsplit::name a command to record, or recordings"
  exit 2
fi

read -ra baselines <<<"$BASELINE"
if ((${#baselines[@]} == 0)); then
  if [[ "$GITHUB_EVENT_NAME" != pull_request ]]; then
    stepsplit baseline "${recordings[@]}" --out stepsplit-baseline.json
    echo "answer=baseline" >>"$GITHUB_OUTPUT"
    exit
  fi
  if [[ ! -f stepsplit-baseline.json ]]; then
    echo "::notice title=stepsplit::no runs of $GITHUB_BASE_REF to compare with: the cache has those of pushes on which this action ran"
    echo "answer=no_baseline" >>"$GITHUB_OUTPUT"
    exit
  fi
  baselines=(stepsplit-baseline.json)
fi

options=()
for one in "${baselines[@]}"; do options+=(--baseline "$one"); done
if [[ -n "$BUDGET" ]]; then options+=(--budget "$BUDGET"); fi
status=0
stepsplit check "${recordings[@]}" "${options[@]}" --summary "$GITHUB_STEP_SUMMARY" \
  --json stepsplit.json --junit stepsplit.xml --markdown stepsplit.md || status=$?
case "$status" in
  0) answer=pass ;;
  1) answer=regressed ;;
  3) answer=inconclusive ;;
  *) exit "$status" ;;
esac
echo "answer=$answer" >>"$GITHUB_OUTPUT"
if [[ "$answer" == inconclusive && "$INCONCLUSIVE" == pass ]]; then exit 0; fi
exit "$status"
