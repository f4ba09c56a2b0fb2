"""Faults: one line of source, changed as a slip of the pen would change it."""

import ast
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

TWINS = (("<", "<="), (">", ">="), ("==", "!="), ("is", "is not"), ("in", "not in"), ("+", "-"), ("and", "or"))
SWAPS = {**dict(TWINS), **{b: a for a, b in TWINS}, "*": "+", "//": "*"}
CPP_SWAPS = {**SWAPS, "&&": "||", "||": "&&", "+=": "-="}  # clang-format puts spaces around operators only
Change = tuple[int, int, int, str]  # index of the line, columns from and to, text in their place


class Mutant(NamedTuple):
    """Function and text without indentation are the same after most moves of code."""

    path: str
    function: str
    before: str
    after: str

    @contextmanager
    def planted(self, root: Path) -> Iterator[str]:
        """In this function, of the same file or of another one; gives file and line, "" if the line is gone."""
        own = root / self.path
        files = sorted((root / self.path.split("/")[0]).rglob(f"*{own.suffix}"), key=lambda f: (f != own, f))
        places = ((f, i, name) for f in files for i, name, text in places_of(f) if text == self.before)
        found = next((place for place in places if place[2] == self.function), None)
        if not found:
            yield ""
            return
        file, index, _ = found
        lines = (text := file.read_text()).splitlines(keepends=True)
        lines[index] = lines[index].replace(self.before, self.after)
        file.write_text("".join(lines))
        yield f"{file.relative_to(root)}:{index + 1}"
        file.write_text(text)


def places_of(file: Path) -> list[tuple[int, str, str]]:
    """Index, function and text of each line."""
    text, names = file.read_text(), {}
    for node in ast.walk(ast.parse(text)) if file.suffix == ".py" else ():  # outer functions come first
        if isinstance(node, ast.FunctionDef):
            names |= dict.fromkeys(range(node.lineno - 1, node.end_lineno), node.name)
    return [(i, names.get(i, ""), line.strip()) for i, line in enumerate(text.splitlines())]


def draw(rng: random.Random, root: Path, folders: list[str], count: int) -> list[Mutant]:
    """Faults in different lines; each line that can be changed is as probable as any other."""
    mutants: dict[tuple[Path, int], list[Mutant]] = {}
    for file in (f for folder in folders for f in (root / folder).rglob("*") if f.suffix in (".py", ".cpp", ".h")):
        lines, places, path = file.read_text().splitlines(), places_of(file), str(file.relative_to(root))
        for index, start, end, new in sorted(set((python if file.suffix == ".py" else cpp)(lines))):
            after = (lines[index][:start] + new + lines[index][end:]).strip()
            mutants.setdefault((file, index), []).append(Mutant(path, *places[index][1:], after))
    return [rng.choice(mutants[place]) for place in rng.sample(sorted(mutants), min(count, len(mutants)))]


def cpp(lines: list[str]) -> Iterator[Change]:
    for index, line in enumerate(lines):
        code = re.sub(r'"[^"]*"', lambda quoted: " " * len(quoted[0]), line.split("//")[0])
        if re.match(r"\s*(#|\*|/\*|template|using|static_assert|throw)", code):
            continue
        for at in re.finditer(r"(?<= )\S+(?= )|\btrue\b|\bfalse\b|(?<=if \()!|(?<![\w.])\d+(?![\w.])", code):
            new = {**CPP_SWAPS, "true": "false", "false": "true", "!": ""}.get(at[0])
            if new is not None or at[0].isdigit():
                yield index, *at.span(), str(int(at[0]) + 1) if new is None else new
        if at := re.match(r"\s*([\w.>:\-]+\([^;]*\)|[\w.>\-]+ [+\-|]?= [^;]*);$", code):
            yield index, *at.span(1), "0"  # the statement is lost


def python(lines: list[str]) -> Iterator[Change]:
    """Of nodes on one line; their columns are in bytes, so it has to be ASCII."""
    tree = ast.parse("\n".join(lines))
    texts = {n for node in ast.walk(tree) if isinstance(node, (ast.JoinedStr, ast.Raise)) for n in ast.walk(node)}
    for parent in ast.walk(tree):
        is_condition = isinstance(parent, (ast.If, ast.While, ast.IfExp))
        node = parent.test if is_condition else parent
        if parent in texts or not hasattr(node, "lineno") or node.lineno != node.end_lineno:
            continue
        index, start, end = node.lineno - 1, node.col_offset, node.end_col_offset
        if not (line := lines[index]).isascii() or "TYPE_CHECKING" in line:
            continue
        if is_condition:
            yield index, start, end, f"(not ({line[start:end]}))"
        match parent:
            case ast.Compare(left, _, [right, *_]) | ast.BinOp(left, _, right) | ast.BoolOp(_, [left, right, *_]):
                start, end = left.end_col_offset, right.col_offset
                if new := SWAPS.get(line[start:end].strip()):
                    yield index, start, end, f" {new} "
            case ast.Constant(bool(value)):
                yield index, start, end, str(not value)
            case ast.Constant(int(value)):
                yield index, start, end, str(value + 1)
            case ast.Call(_, args, [*others, last]) if args or others:
                before = max(n.end_col_offset for n in (*args, *(k.value for k in others)))
                yield index, before, last.end_col_offset, ""
            case ast.Assign() | ast.AugAssign() | ast.Expr(ast.Call() | ast.Yield() | ast.YieldFrom()):
                yield index, start, end, "pass"
