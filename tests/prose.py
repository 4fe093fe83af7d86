"""Find phrases in docstrings, comments, messages and pages that read like a translation.

    python tests/prose.py                 # the number of phrases for 100 lines of prose; fails above LIMIT
    python tests/prose.py --list          # each phrase, as file:line
    python tests/prose.py warpfold/ops    # some files or folders

The patterns find common symptoms of unclear English. A sentence that matches is rewritten, not the pattern; a sentence
that does not match may still be unclear. CONTRIBUTING.md has the rules.
"""

import argparse
import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Phrases for 100 lines of prose.
LIMIT = 1.0
RULES = {
    "use a noun in place of a clause": re.compile(
        r"\b(?:of|for|with|to|by|from|as|and|than) what (?:is|are|was|were|it|they|has|have|the|a)\b"
        r"|\bwhat (?:is|are|was|were) (?:there|not|in|of|on|to|made|asked|given|said)\b"
        r"|\bthat which\b|\bof which (?:there|no|none|some|one)\b|\bthose (?:which|of which|whose)\b"
    ),
    "name the subject": re.compile(r"(?i)\b(?:nobody|somebody|whoever|whosoever|whatever (?:it|they|is|was))\b"),
    "use a common technical word": re.compile(
        r"\b(?:[Bb]eside|aside|hitherto|thereof|therein|whereof|at hand|is (?:said|told)|(?:are|was) told)\b"
        r"|\b(?:in|by) turns\b|\bso many\b|\bas it comes\b|\bto the bit\b|\bfor lack of\b"
    ),
    "start with the subject": re.compile(r"(?:^|[.!?] +)(?:Of|As of|By) (?:a|an|the|each|what|these)\b[^,.]*\.?$"),
    "split the sentence": re.compile(r";[^;.()`]*;|:[^:.()`]*: [^:.()`]*:"),
}
# Lists of arguments ("x: [N, 3]; mask: [N]") and rows of tables are not sentences.
NOT_A_SENTENCE = re.compile(r"[\w, `*]+: |\|")
# Pages that a script writes from data.
GENERATED = {"docs/benchmarks.md"}
# Words in code are names.
CODE = re.compile(r"`[^`]*`|\]\([^)]*\)|https?://\S+")


def paragraphs_of_python(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each line of a docstring or comment, and of each message of a raised error."""
    source = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# noqa", "#!")):
            yield token.start[0], token.string.lstrip("# ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for offset, line in enumerate(node.value.value.splitlines()):
                yield node.lineno + offset, line.strip()
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                    yield part.lineno, part.value


def paragraphs_of_markdown(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) outside code blocks."""
    is_code = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield number, line.strip()


def find_phrases(path: Path) -> tuple[int, list[tuple[int, str, str]]]:
    """Count the lines of prose in a file, and list the phrases: (line, rule, text)."""
    lines = paragraphs_of_python(path) if path.suffix == ".py" else paragraphs_of_markdown(path)
    count, phrases = 0, []
    for number, line in lines:
        text = CODE.sub("CODE", line)
        # Lines of fewer than three words are headings, table rules or names.
        if len(text.split()) < 3:
            continue
        count += 1
        rules = [rule for rule, pattern in RULES.items() if pattern.search(text)]
        if NOT_A_SENTENCE.match(text):
            rules = [rule for rule in rules if rule != "split the sentence"]
        phrases += [(number, rule, line) for rule in rules]
    return count, phrases


def files_under(paths: list[Path]) -> list[Path]:
    """List the Python and Markdown files that git knows in these files and folders."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--", *map(str, paths)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    files = [ROOT / name for name in names.split("\0") if name.endswith((".py", ".md"))]
    # This file quotes the phrases.
    left_out = {Path(__file__).resolve(), *(ROOT / name for name in GENERATED)}
    return [path for path in files if path.is_file() and path not in left_out and "vendor" not in path.parts]


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT])
    parser.add_argument("--list", action="store_true", help="print each phrase")
    arguments = parser.parse_args()
    total = hits = 0
    for path in files_under([path.resolve() for path in arguments.paths]):
        count, phrases = find_phrases(path)
        total, hits = total + count, hits + len(phrases)
        if arguments.list:
            for number, rule, text in sorted(phrases):
                print(f"{path.relative_to(ROOT)}:{number}: {rule}: {text[:120]}")
    share = 100 * hits / max(total, 1)
    print(f"prose: {hits} phrases to rewrite in {total} lines, {share:.2f} for 100 lines (limit {LIMIT})")
    if share > LIMIT:
        print("prose: rewrite the sentences that `python tests/prose.py --list` prints.", file=sys.stderr)
    return int(share > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
