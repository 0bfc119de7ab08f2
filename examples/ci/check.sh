#!/usr/bin/env bash
# What action.yml runs: the gate, its answer as an output, its words in the step's summary.
set -uo pipefail

read -ra candidates <<<"$CANDIDATE"
read -ra baselines <<<"$BASELINE"
words=()
for one in "${baselines[@]}"; do words+=(--baseline "$one"); done
if [[ -n "${BUDGET:-}" ]]; then words+=(--budget "$BUDGET"); fi

stepsplit check "${candidates[@]}" "${words[@]}" --summary "$GITHUB_STEP_SUMMARY" \
  --json stepsplit.json --junit stepsplit.xml --markdown stepsplit.md
status=$?

case "$status" in
  0) answer=pass ;;
  1) answer=regressed ;;
  3) answer=inconclusive ;;
  *) exit "$status" ;;
esac
echo "answer=$answer" >>"$GITHUB_OUTPUT"
if [[ "$answer" == inconclusive && "${INCONCLUSIVE:-pass}" == pass ]]; then exit 0; fi
exit "$status"
