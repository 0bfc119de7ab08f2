#!/usr/bin/env bash
# Writes the result as a comment of the pull request, in place of that of the push before. What goes wrong is a
# warning: the token of a fork's pull request may not write, and the check has said what it found.
set -euo pipefail
if [[ ! -f stepsplit.md ]]; then exit 0; fi

marker="<!-- stepsplit $NAME -->"
body=$(mktemp)
{ echo "$marker"; cat stepsplit.md; } >"$body"
comments="repos/$GITHUB_REPOSITORY/issues"
# Only a bot's: anyone may write a comment that begins with the marker.
own=".[] | select(.user.type == \"Bot\" and (.body | startswith(\"$marker\"))) | .id"
if id=$(gh api --paginate "$comments/$NUMBER/comments" --jq "$own" | tail -n 1); then
  target=(--method POST "$comments/$NUMBER/comments")
  if [[ -n "$id" ]]; then target=(--method PATCH "$comments/comments/$id"); fi
  if gh api "${target[@]}" -F "body=@$body" >/dev/null; then exit 0; fi
fi
echo "::warning title=stepsplit::no comment: the token may not write to pull requests"
