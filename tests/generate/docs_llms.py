"""Writes docs/llms.txt: the pages of the docs for language models.

cd tests && ../.venv/bin/python -m generate.docs_llms
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
FIRST = ("method.md", "causes.md", "recording.md", "agents.md", "notebooks.md", "formats.md")
"""Pages that answer most questions; the others follow as optional."""

HEAD = """\
# stepsplit

> Splits training steps of multi-GPU jobs (torch.profiler, Nsight, gloo and NCCL) into compute,
> collective, message, waiting, pipeline-bubble, copy and idle time, exactly; says which rank and
> cause cost how much; compares with an analytical model.

For agents: `stepsplit mcp FOLDER` serves read-only tools, `stepsplit skill --print` says how to
use them, `stepsplit schema NAME` prints the JSON Schema of a result. Times are nanoseconds, sizes
bytes, ratios 0..1.
"""


def build_llms() -> str:
    """The file: each page with its title and what it is about."""
    pages = sorted(DOCS.glob("*.md"), key=lambda page: page.name)
    first = [page for name in FIRST for page in pages if page.name == name]
    others = [page for page in pages if page not in first]
    schemas = sorted((DOCS / "schemas").glob("*.json"))
    parts = [HEAD, "## Docs\n", *map(_describe_page, first)]
    parts += ["\n## Schemas\n", *(f"- [{one.stem}](schemas/{one.name})" for one in schemas)]
    parts += ["\n## Optional\n", *map(_describe_page, others)]
    return "\n".join(parts) + "\n"


def _describe_page(page: Path) -> str:
    """A link with the first sentence below the title."""
    text = page.read_text()
    title = re.search(r"^# (.*)$", text, flags=re.MULTILINE)
    body = text[title.end() :] if title else text
    plain = next((one for one in body.split("\n\n") if re.match(r"\s*(?!```)[A-Za-z`*]", one)), "")
    sentence = " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", plain).split())
    end = re.search(r"(?<!\.)[.:](?= |$)", sentence)
    said = textwrap.shorten(sentence[: end.start()] if end else sentence, 200, placeholder=" ...")
    return f"- [{title[1] if title else page.stem}]({page.name}): {said}"


if __name__ == "__main__":
    (DOCS / "llms.txt").write_text(build_llms())
